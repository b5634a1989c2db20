"""The folder, or zip file, from which this jaxengine was imported."""

from __future__ import annotations

from pathlib import Path

# The folder, or zip file, that holds the package: what sys.path of a process of ours must contain.
HOME = Path(__file__).resolve().parents[1]
