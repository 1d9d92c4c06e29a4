"""Reads `llama_get_memory_breakdown`, which gives exact bytes by buffer type but as a C++ map.

      returned by value, 48 bytes                    a node of the tree
  +----------+---------------------+-------+   +---------------------+--------+-------+---------+---------+
  | compare  | header node         | count |   | colour, parent,     | buffer | model | context | compute |
  | (empty)  | .. root, first, last|       |   | left, right         | type   |       |         |         |
  +----------+---------------------+-------+   +---------------------+--------+-------+---------+---------+

That is libstdc++'s std::map on 64-bit Linux; llama.cpp has no C function for it. `read` checks the values as far as
possible (few nodes, printable names), and the caller compares the compute sizes with the log.
"""

from collections.abc import Iterator
from typing import Any

from tokenmill.engine.fit_params import Buffer
from tokenmill.native.llama.cdefs import BREAKDOWN_SYMBOL, breakdown_readable
from tokenmill.native.llama.library import Library

# Large enough for 16 GPUs with a host buffer each and every processor buffer type.
_MOST_NODES = 64


def read(library: Library, context: Any) -> tuple[Buffer, ...] | None:
    """Bytes of every buffer type of a context; None if the library or the machine does not provide them."""
    if not breakdown_readable() or not hasattr(library.lib, BREAKDOWN_SYMBOL):
        return None
    # The map's nodes are never freed: a few hundred bytes in a process that lives for seconds.
    found = getattr(library.lib, BREAKDOWN_SYMBOL)(context)
    if not 0 < found.count <= _MOST_NODES:
        return None
    buffers = []
    for node in _walk(library, found.root, int(found.count)):
        name = library.text(library.lib.ggml_backend_buft_name(node.type))
        if not (name.isascii() and name.isprintable() and name):
            return None
        buffers.append(Buffer(name, int(node.model), int(node.context), int(node.compute)))
    return tuple(sorted(buffers, key=lambda buffer: buffer.name)) if len(buffers) == found.count else None


def _walk(library: Library, root: Any, most: int) -> Iterator[Any]:
    """The nodes of the tree; at most `most` + 1."""
    waiting = [root]
    while waiting and most >= 0:
        node = waiting.pop()
        if node != library.ffi.NULL:
            most -= 1
            yield node
            waiting += [node.left, node.right]
