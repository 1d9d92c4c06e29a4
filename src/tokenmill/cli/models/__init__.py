"""`tokenmill models`: what is in the catalogue and the cache, and how to get or make more."""

from cyclopts import App

app = App(name="models", help="List, pull, verify and make model files.")
app.command("tokenmill.cli.models.list:list_models", name="list")
app.command("tokenmill.cli.models.ghost:ghost")
app.command("tokenmill.cli.models.synth:synth")
app.command("tokenmill.cli.models.pull:pull")
app.command("tokenmill.cli.models.verify:verify")
