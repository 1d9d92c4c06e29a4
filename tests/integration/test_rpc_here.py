"""Whether the installed llama.cpp supports RPC."""

from tokenmill.native.llama.library import open_library


def test_the_wheel_has_no_rpc_backend() -> None:
    """As documented in docs/hosts.md, which tells users to build llama.cpp.

    If this fails, the wheel now supports RPC: run the comparison of bench/rpc.py with the wheel, and update that page.
    """
    library = open_library(more="bool llama_supports_rpc(void);")
    assert not library.lib.llama_supports_rpc()
