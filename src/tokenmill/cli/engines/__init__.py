"""`tokenmill engines`: what runs here, and how to end it."""

from cyclopts import App

from tokenmill.cli.engines.list import list_engines

app = App(name="engines", help="Show the engines that run here, how they are, and end them.")
app.default(list_engines)
app.command(list_engines, name="list")
app.command("tokenmill.cli.engines.stop:stop")
app.command("tokenmill.cli.engines.log:log")
