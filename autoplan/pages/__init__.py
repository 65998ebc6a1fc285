"""Pages: figures and self-contained HTML reports, made from the JSON answers of commands. Imports no planner.

`figures`: figures as plain data of plotly (`{"data", "layout"}`), which a page draws and a notebook shows.
`blocks`: what a section of a page consists of: figures, tables, facts, texts to copy.
`sections`: the sections, each declared with the answers it belongs to.
`page`: one HTML file with everything in it: style, data, and the library that draws.
"""

EXTRA = "pip install 'autoplan[report]'"  # what installs the libraries of figures and reports
