"""Pages to look at: one HTML file, no network, no server. Reads the files of runs, never models.

A page is sections of HTML and, by name, data for its script:

    from rolecall.look.page import Section, page, text
    from rolecall.look.tokens import Sample, SampleSet, token_view

    view, drawn_from = token_view("tokens", [SampleSet(label="samples", samples=[Sample(...), ...])])
    html = page(
        title="Audit of rows.jsonl",
        lead=f"<p>{text(anything_a_model_or_user_wrote)}</p>",
        sections=[Section(id="tokens", title="Token by token", body=view)],
        data=[drawn_from],
    )

`text` makes anything safe to show: markup is escaped, and what cannot be seen (controls, direction marks, escapes for
terminals) is spelt out. Text inside data is made visible by who builds the data (`visible_text`), and the script only
ever sets it as text. A `Sample` is one sequence: its pieces (`policy.token_text.token_bytes`), roles, verdicts, and
numbers by name; `QUANTITIES` says which names are known and how they are coloured. `curves.curve_cards` draws charts.
"""
