"""Helpers that several test files share: processes, files, small models and runs. Some modules
write pages of the documents.
"""
