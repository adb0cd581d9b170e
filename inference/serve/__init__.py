"""A trained model behind HTTP.

One process speaks HTTP (FastAPI and uvicorn; no Paddle in it). ``workers`` processes decode and
compute, each with its own model. LitServe stands on the same two libraries and batches, too. What
is wanted besides would have to be built around it: an error per image, a lost worker replaced, a
drain, limits on everything. So it would save little.

    server     the socket, signals, the order of start and end;  protocol: HTTP/1.1 of a connection
    gate       what every request goes through: token, limits, times, log, counts
    app        the paths and their answers;  page: what a browser sees
    bodies     images out of a request;  image_formats: which ones are taken
    batching   images that wait, and batches of them
    workers    the computing processes, as the HTTP process sees them
    messages   what goes between;  progress: what they are at, which can be read when they have died
    compute    what such a process does;  overlay: where a model looks;  memory: what goes back
"""

from inference.serve.server import serve
from inference.serve.settings import Settings

__all__ = ["Settings", "serve"]
