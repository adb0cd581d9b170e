"""What several test files share: processes, files of every kind, small models and runs, and the
makers of pages.
"""
