"""`tokenmill engines`: lists, inspects and stops the engines on this machine."""

from cyclopts import App

from tokenmill.cli.engines.list import list_engines

app = App(name="engines", help="List, inspect and stop the engines on this machine, and build llama.cpp for it.")
app.default(list_engines)
app.command(list_engines, name="list")
app.command("tokenmill.cli.engines.stop:stop")
app.command("tokenmill.cli.engines.log:log")
app.command("tokenmill.cli.engines.build:build")
app.command("tokenmill.cli.engines.build:list_builds", name="builds")
app.command("tokenmill.cli.engines.build:remove_build", name="remove-build")
