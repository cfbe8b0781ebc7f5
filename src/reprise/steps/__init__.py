"""The one composition root: a function per step, from fetching the data to the release.

The command line and the Prefect tasks call these functions and nothing below them, so there is one way to do each thing. Between
steps travel a ``Project`` (paths and config) and a run key; every step can be run again alone from the files of the step before.
"""
