"""Workflow files of Visor: recognise them, and convert them to files of ours."""
