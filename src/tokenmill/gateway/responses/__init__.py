"""/v1/responses.

routes.py      create, retrieve, cancel and delete responses
events.py      answers as response objects and streaming events
stored.py      responses that are kept, and conversations as chains of them
background.py  responses that run as batch jobs
"""
