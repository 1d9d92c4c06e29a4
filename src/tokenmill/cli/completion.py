"""`tokenmill completion`: writes the shell's completion script."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.completion.detect import ShellDetectionError, detect_shell

from tokenmill.cli import app
from tokenmill.cli.output import Common, show_json, show_text
from tokenmill.errors import UsageError

Shell = Literal["bash", "zsh", "fish"]
_FOLDERS = {
    "bash": Path(".local/share/bash-completion/completions/tokenmill"),
    "zsh": Path(".local/share/tokenmill/zsh/_tokenmill"),
    "fish": Path(".config/fish/completions/tokenmill.fish"),
}
"""Where each shell's script is installed, below the home folder."""


def completion(
    shell: Shell | None = None,
    /,
    *,
    output: Annotated[str | None, Parameter(name=["--output", "-o"], metavar="FILE", allow_leading_hyphen=True)] = None,
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Install shell completion of commands and options.

    Writes the script where the shell looks for it, and prints the line that loads it, if one is needed.

        tokenmill completion
        tokenmill completion zsh -o - > _tokenmill

    Parameters
    ----------
    shell
        bash, zsh or fish. [default: the shell that runs this command]
    output
        Write the script to FILE instead of the user's folder for it; `-` is stdout.
    """
    shell = shell or _running_shell()
    script = app.generate_completion(shell=shell)
    if output == "-":
        show_text(script)
        return 0
    path = Path(output) if output else Path.home() / _FOLDERS[shell]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script, encoding="utf-8")
    if common.json:
        show_json({"shell": shell, "path": path})
    else:
        show_text(f"wrote {path}\n{_activation(shell, path)}")
    return 0


def _running_shell() -> Shell:
    try:
        shell = detect_shell()
    except ShellDetectionError:
        shell = None
    for known in ("bash", "zsh", "fish"):
        if shell == known:
            return known
    raise UsageError("cannot tell which shell runs this command", hint="name it: tokenmill completion bash")


def _activation(shell: Shell, path: Path) -> str:
    if shell == "fish":
        return "start a new shell"
    line = f". {path}" if shell == "bash" else f"fpath=({path.parent} $fpath); autoload -Uz compinit; compinit"
    return f"add this line to ~/.{shell}rc, then start a new shell:\n{line}"
