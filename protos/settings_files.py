"""Settings as files: a folder that holds a file for each, as Docker and Kubernetes hand secrets to a container.

A service that finds `/run/secrets/quire_cluster_token` takes its content for QUIRE_CLUSTER_TOKEN; any other setting can
come that way too. Flags and variables count before files, and a file of a later folder before that of an earlier one.
"""

import os
from collections.abc import Mapping
from pathlib import Path

FOLDERS_VARIABLE = "QUIRE_SETTINGS_FOLDERS"
# What `python -m quire.prepare` has written, then what whoever runs the containers has mounted.
USUAL_FOLDERS = ("/run/quire", "/run/secrets")


def settings_folders(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the folders in which settings may lie as files, the later ones first in rank: those of them that exist.

    QUIRE_SETTINGS_FOLDERS, paths with a colon between two, replaces the usual ones.
    """
    named = environ.get(FOLDERS_VARIABLE)
    folders = USUAL_FOLDERS if named is None else tuple(filter(None, named.split(os.pathsep)))
    return [path for path in map(Path, folders) if path.is_dir()]
