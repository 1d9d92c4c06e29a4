"""Builds of llama.cpp with more sequences than the wheel allows, and for the GPU of this machine.

build.py      `build`: runs the steps below and publishes the result; `tokenmill engines build`
source.py     the source code: where it comes from, which files are needed, what is changed in it
toolchain.py  cmake, ninja, compilers and cards; the cmake command
verify.py     opens the finished library in a process of its own
finished.py   finished builds, and the one that the native engine uses

Nothing here imports the command line's packages, so `build` also works where they are not installed.
"""
