"""The desk: where every call of an app's command is taken in, whatever the surface."""

from .desk import Desk as Desk
