"""A plan in words: `text.as_text` for people, `document.as_json` for programs, `page.as_html` for both.

`report` counts once what the three write down. Knows plans and their rows; knows neither models nor styles.
"""
