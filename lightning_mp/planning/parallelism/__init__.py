"""Layouts over devices: what each sends over which link, and how long a pipeline idles."""
