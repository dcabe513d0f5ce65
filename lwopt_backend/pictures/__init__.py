"""Pictures and the HTML report of a study, drawn from its document. They need matplotlib, which is an extra."""

from lwopt_backend.config.options import install_command

try:
    import matplotlib  # noqa: F401
except ImportError as missing:
    raise ImportError(
        f"pictures and HTML reports need matplotlib ({missing}); install it with: {install_command('matplotlib')}"
    ) from missing

from lwopt_backend.pictures.panels import draw_plan, save_html, save_plan_png

__all__ = ["draw_plan", "save_html", "save_plan_png"]
