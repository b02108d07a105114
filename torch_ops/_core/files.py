"""Files that nobody vouches for: which of them are opened at all."""

import os
import stat


class NotStoredError(ValueError):
    """A file that is a pipe or a device."""


def check_stored(file: str | os.PathLike[str]) -> None:
    """Refuse pipes and devices, also behind links: to open one may wait forever, and to read one may never end.

    Raises NotStoredError, a ValueError, for them. Files that cannot be asked about raise what opening them would.
    """
    mode = os.stat(file).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise NotStoredError(f"{os.fspath(file)} is a pipe or a device; give a file")


__all__ = ["NotStoredError", "check_stored"]
