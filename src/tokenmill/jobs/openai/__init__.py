"""OpenAI's chat and completion protocol.

requests.py   models of request bodies: what is accepted, and the schemas of /openapi.json
call.py       validation of a body, and its conversion to a `Call`, from which an engine request is made
answers.py    answers as OpenAI's response objects
"""
