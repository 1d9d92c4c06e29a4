"""Whether llama.cpp at hand can share a model with other hosts, and what its RPC server is told."""

from tokenmill.native.llama.library import open_library


def test_the_wheel_has_no_rpc_backend() -> None:
    """docs/hosts.md says so, and sends people to a build of their own.

    When this fails the wheel has got it: run bench/rpc.py's comparison here, with the wheel, and change that page.
    """
    library = open_library(more="bool llama_supports_rpc(void);")
    assert not library.lib.llama_supports_rpc()
