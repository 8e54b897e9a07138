"""Workflow files of other tools: recognise them, and convert them to files of ours."""
