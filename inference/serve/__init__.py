"""Serves a trained model over HTTP.

One process speaks HTTP (FastAPI and uvicorn) and doesn't import Paddle. Worker processes decode
images and compute; each has the model. LitServe, which batches on the same two libraries, would
save little. It lacks an error for each image, the replacement of lost workers, and most limits, and
doesn't complete requests at the end.

In the HTTP process:

- ``server``: the socket, signals, start and end. ``protocol``: HTTP/1.1 of a connection.
- ``gate``: the checks of every request (token, limits, times), the log and the counts.
- ``app``: the paths and their answers. ``page``: the pages for a browser.
- ``bodies``: the images of a request. ``image_formats``: which formats are accepted.
- ``batching``: the queue of images, and batches of them.
- ``workers``: starts the workers, gives them batches, and replaces them.
- ``settings``: the settings of a server. ``metrics``: the counts that Prometheus reads.

Between both: ``messages`` over a socket, and ``progress`` in shared memory. In a worker:
``compute``, and ``overlay``, which draws where a model looks. ``memory`` returns memory to the
system in both.
"""

from inference.serve.server import serve
from inference.serve.settings import Settings

__all__ = ["Settings", "serve"]
