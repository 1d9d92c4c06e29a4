"""The text of HTML pages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.recipes.summarization.html import declared_encoding, page_text

PAGE = """<!doctype html><html><head><title>The mill</title><style>p { color: red }</style>
<script>if (a < b) { document.write("<p>no</p>") }</script></head><body>
<h1>A  <b>mill</b></h1><p>One <a href="x">two</a>,<br>three &amp; four&nbsp;five.</p>
<ul><li>first</li><li>second <em>thing</em></li></ul>
<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr></table>
<pre>x = 1
  y</pre><noscript>hidden</noscript><h2>End</h2>last</body></html>"""


def test_only_visible_text_is_kept() -> None:
    assert page_text(PAGE) == (
        "The mill\n\n# A mill\n\nOne two,\nthree & four five.\n\n- first\n- second thing\n\n"
        "a | b\n1 | 2\n\nx = 1\n  y\n\n## End\n\nlast"
    )


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("", ""),
        ("plain", "plain"),
        ("<p>a</p><p>b", "a\n\nb"),
        ("<div><svg><text>x</text></svg>y</div>", "y"),
        ("<template><template>x</template>y</template>z", "z"),
        ("<script>x", ""),
        ("</p></pre></script>a", "a"),
        ("<b>a</b><i>b</i> <u>c</u>", "ab c"),
        ("1 < 2 & 3", "1 < 2 & 3"),
    ],
)
def test_damaged_and_odd_markup(page: str, text: str) -> None:
    assert page_text(page) == text


@given(st.text(st.sampled_from('<>/!-& "=abphr1ul\n'), max_size=80))
def test_any_text_can_be_parsed(page: str) -> None:
    assert "\n\n\n" not in page_text(page)


@pytest.mark.parametrize(
    ("data", "encoding"),
    [
        (b'<meta charset="iso-8859-1">', "iso-8859-1"),
        (b'<META http-equiv="x" content="text/html; charset=windows-1252">', "windows-1252"),
        (b"<p>charset=x</p>", None),
    ],
)
def test_declared_encodings_of_pages(data: bytes, encoding: str | None) -> None:
    assert declared_encoding(data) == encoding
