"""The last that a fork server imports. What it has by then is left to no collection of garbage: that would copy every
page that its forks share.
"""

import gc

gc.collect()
gc.freeze()
