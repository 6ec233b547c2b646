"""A local page over every run in a directory: read-only, for this machine alone, and live while runs train.

runs.py      which runs lie in the directory, and a line about each
logs.py      their logs, of which only what was appended is read
answers.py   search and filters over recorded answers, and one answer token by token
compare.py   several runs on one page
pages.py     what each page shows
app.py       addresses, and who may ask for them
server.py    the socket and the process
"""
