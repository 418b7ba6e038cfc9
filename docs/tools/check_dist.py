"""Whether an index would accept the files of `python -m build`: the checks of `twine check
--strict` and a few more.

python docs/tools/check_dist.py dist
"""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from pathlib import Path

from packaging.metadata import Metadata

FENCE = re.compile(r"^```", re.M)


def check(folder: Path) -> str:
    """The version. Raises `ValueError` for files that an index would refuse or display wrongly."""
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        of_wheel = archive.read(name)
    with tarfile.open(sdist) as packed:
        found = packed.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/PKG-INFO")
        of_sdist = found.read() if found else b""
    if of_wheel != of_sdist:
        raise ValueError(f"{wheel.name} and {sdist.name} are described differently")
    try:
        told = Metadata.from_email(of_wheel, validate=True)  # every field, as the standard has it
    except ExceptionGroup as errors:
        raise ValueError(
            f"{wheel.name}: {'; '.join(str(one) for one in errors.exceptions)}"
        ) from None
    if not (told.description_content_type or "").startswith("text/markdown"):
        raise ValueError(
            f"the description is shown as plain text: its type is {told.description_content_type}"
        )
    if not told.description or len(FENCE.findall(told.description)) % 2:
        raise ValueError(
            "README.md is empty, or a ``` in it is not closed: half of the page would be code"
        )
    return str(told.version)


if __name__ == "__main__":
    print(f"version {check(Path(sys.argv[1]))}: an index would take wheel and sdist")
