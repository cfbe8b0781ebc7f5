"""Measurements: what the README and the recipes' headers quote. Each script prints a table and the machine it ran on."""

from reprise.surroundings import set_defaults

set_defaults()  # before torch is imported: the OpenMP library reads its settings once
