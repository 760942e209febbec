"""A training project whose runs repeat bit for bit. What you edit lies here; `repro` is the library."""

from pathlib import Path

from .repro.base.project import Project

PROJECT = Project(Path(__file__).resolve().parent)
