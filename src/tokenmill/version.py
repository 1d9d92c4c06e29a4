"""The version of tokenmill, and the packages that its hints tell users to install."""

__version__ = "0.1.0"

WHEEL = "xllamacpp"
WHEEL_VERSION = "2026.10.11549"
INSTALL_HINT = f"pip install '{WHEEL}=={WHEEL_VERSION}'"
EXTRAS = {
    "postgres": "psycopg[binary]>=3.2,<4",
    "ray": "ray>=2.40,<3",
    "recipes": "datasketch>=2,<3",
}
"""The package of each extra in pyproject.toml."""


def install_hint(extra: str) -> str:
    """The command that installs an extra. It names the extra's package, which every index has, and not tokenmill."""
    return f"pip install '{EXTRAS[extra]}'"
