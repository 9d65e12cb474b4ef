"""From sglang/srt/utils/common.py."""


def kill_process_tree(parent_pid, include_parent: bool = True, skip_pid: int | None = None):
    """The real one kills the engine's processes, which the stand-in does not have."""
