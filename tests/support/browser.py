"""Pages in headless Chromium: run it, and measure layout and contrast of the rendered page."""

import json
import re
import shutil
import subprocess
import tempfile

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--virtual-time-budget=4000",
)  # fmt: skip
DARK = "--blink-settings=preferredColorScheme=0"

MEASURE = """<script>
const measure = () => {
  const outside = [], faint = [];
  const named = e => e.tagName + (e.id ? "#" + e.id : "") + " " + (e.textContent || "").trim().slice(0, 40);
  const numbers = text => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const linear = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = c => c.slice(0, 3).map(v => linear(v / 255))
    .reduce((sum, v, n) => sum + v * [.2126, .7152, .0722][n], 0);
  const behind = e => {
    for (let at = e; at; at = at.parentElement) {
      const c = numbers(getComputedStyle(at).backgroundColor);
      if (c.length < 4 || c[3] > .9) return c;
    }
    return [255, 255, 255];
  };
  for (const e of document.body.querySelectorAll("*")) {
    const box = e.getBoundingClientRect(), style = getComputedStyle(e);
    if (!box.width || style.visibility === "hidden" || e.closest("#cy, pre, script")) continue;
    if (box.left < -1 || box.right > innerWidth + 1) outside.push(named(e));
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) continue;
    const colour = numbers(e instanceof SVGElement ? style.fill : style.color);
    const [high, low] = [light(colour), light(behind(e))].sort((a, b) => b - a);
    if ((high + .05) / (low + .05) < 4.5) faint.push(named(e) + " " + style.color + " on " + behind(e));
  }
  for (const e of document.querySelectorAll(".wide, .chart")) {
    if (e.scrollWidth > e.clientWidth + 1) outside.push(named(e));
  }
  console.log("MEASURED" + JSON.stringify({ width: innerWidth, outside, faint,
    page: document.documentElement.scrollWidth, back: light(behind(document.body)) }) + "END");
};
addEventListener("resize", measure);  // headless Chromium begins at least 500 pixels wide
measure();
</script>"""


def browse(*words, size=(1440, 900)):
    """Run Chromium with a new profile; return the finished process."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}"]
        return subprocess.run([*flags, *map(str, words)], capture_output=True, text=True, check=True, timeout=120)


def assert_layout(url, picture, width, dark):
    """Render the page: no element is outside the view, and all text has a contrast of 4.5 in the right mode."""
    mode = [DARK] if dark else []
    done = browse(*mode, f"--screenshot={picture}", url, size=(width, 1600))
    found = json.loads(re.findall(r"MEASURED(.*?)END", done.stderr)[-1])
    assert found["width"] == width
    assert found["page"] <= width
    assert found["outside"] == []
    assert found["faint"] == []
    assert (found["back"] < 0.2) == dark
    assert picture.stat().st_size > 10_000
