"""fetch, split, encode: what DVC runs and caches. No torch is loaded here."""

from __future__ import annotations

import os
from pathlib import Path

from reprise.data.encode import encode_splits
from reprise.data.sources import fetch_encoder, fetch_source
from reprise.data.split import make_splits
from reprise.project import Project


def fetch(project: Project) -> Path:
    """The path of files.json, which lists the raw files; remote ones are downloaded once and checked by sha256.

    A pretrained encoder, where the params name one, is put into data/encoder.
    """
    fetch_encoder(
        project.config.tokenizer.encoder,
        project.workdir,
        project.encoder_dir,
        cache_dir=download_cache(),
        governed_by_dvc=project.is_governed_by_dvc,
    )
    return fetch_source(
        project.config.data.source,
        project.workdir,
        project.raw_dir,
        cache_dir=download_cache(),
        governed_by_dvc=project.is_governed_by_dvc,
    )


def download_cache() -> Path:
    """Where downloads are kept by their sha256: REPRISE_CACHE_DIR, else the user's cache folder. Outside every DVC output."""
    chosen = os.environ.get("REPRISE_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "reprise" / "downloads"


def split(project: Project) -> Path:
    """The path of split.json; every row read, checked and assigned to train, validation or test."""
    return make_splits(
        project.raw_dir / "files.json", project.workdir, project.split_dir, project.quarantine_path, project.config.data
    )


def encode(project: Project) -> Path:
    """The path of manifest.json of the tokenised dataset."""
    return encode_splits(project.split_dir, project.encoder_dir, project.encoded_dir, project.config)
