"""What an operation did to a model, for whoever must decide whether the model is still good."""

from sp24cli.reporting.html import as_html
from sp24cli.reporting.layers import Summary, summarize
from sp24cli.reporting.markdown import as_markdown

__all__ = ["Summary", "as_html", "as_markdown", "summarize"]
