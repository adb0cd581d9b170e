"""What a run is: the command line, the loop, what it reports and leaves behind. A program imports
what it needs of it: ``-h`` and a wrong command line are answered before Paddle is imported.
"""
