"""The report: one offline HTML file rendered from the JSON that the rooms emit.

    run directory -> `run.Run` (tolerant) -> one `view(run)` a section -> `template.html.j2` -> report.html

`render.render_report` is the way in. Nothing is computed here that a stage did not measure; a missing piece
becomes a visible note. Everything read from a run directory is untrusted text, and the template escapes it.
"""
