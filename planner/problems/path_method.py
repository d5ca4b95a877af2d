"""How paths are found, by name."""

from __future__ import annotations

import enum


class PathMethod(enum.StrEnum):
    """How to find paths.

    ``straight`` is DT-FM's pipeline, ``dtfm-skip`` its skipping (Appendix B.1), ``no-tc2`` the
    choice of paths that ignores collisions, ``reuse`` the paths of one wave for one wave after the
    other (Appendix D.1), ``cbs`` the paper's conflict-based search (Algorithm 1), its paths
    dispatched first in, first out; UNKNOWN if the limit comes before its first valid paths. An
    iteration of several waves begins with the paths that ``cbs`` finds for one, repeated.
    """

    AUTO = "auto"
    STRAIGHT = "straight"
    DTFM_SKIP = "dtfm-skip"
    NO_TC2 = "no-tc2"
    REUSE = "reuse"
    CBS = "cbs"
