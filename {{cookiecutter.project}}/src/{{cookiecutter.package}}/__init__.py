"""A training project whose runs repeat bit for bit. What you edit lies here; samebits is the library."""

from pathlib import Path

from samebits import loader
from samebits.base.project import Project

loader.cover(__name__)
PROJECT = Project(Path(__file__).resolve().parent)
