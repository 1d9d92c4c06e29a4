"""OpenAI's chat and completion protocol.

requests.py    models of request bodies: what is accepted, and the schemas of /openapi.json
validation.py  validation with a model, and its errors
call.py        a validated body as a `Call`, from which an engine request is made
answers.py     answers as OpenAI's response objects
logprobs.py    token probabilities
embeddings.py  jobs that ask for embeddings
responses/     the Responses API, translated to and from chats
"""
