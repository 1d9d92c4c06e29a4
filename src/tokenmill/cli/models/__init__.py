"""`tokenmill models`: lists, downloads, verifies and generates model files."""

from cyclopts import App

app = App(name="models", help="List, download, verify and generate model files.")
app.command("tokenmill.cli.models.list:list_models", name="list")
app.command("tokenmill.cli.models.ghost:ghost")
app.command("tokenmill.cli.models.synth:synth")
app.command("tokenmill.cli.models.pull:pull")
app.command("tokenmill.cli.models.verify:verify")
