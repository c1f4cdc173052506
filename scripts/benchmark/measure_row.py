"""How much memory a measurement took."""

import resource
import sys


def peak() -> int:
    """Largest memory that this process ever held, in bytes."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
