"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const canvas = document.getElementById("timeline"), says = document.getElementById("says");
  const context = canvas.getContext("2d"), rows = data.devices, end = data.end_s || 1;
  const colours = data.colours, high = Math.max(7, Math.min(20, 1200 / rows.length)), top = 20;
  let left = 0, span = end, asked = false, drag = null;
  const wide = () => canvas.clientWidth || 600;
  const margin = () => Math.min(150, wide() * 0.25);
  const limit = () => {
    span = Math.min(end, Math.max(end * 1e-6, span));
    left = Math.min(end - span, Math.max(0, left));
  };
  const draw = () => {
    asked = false;
    const style = getComputedStyle(document.documentElement), ratio = devicePixelRatio || 1;
    const ink = style.getPropertyValue("--ink"), hot = style.getPropertyValue("--hot");
    const w = wide(), h = top + high * rows.length, m = margin(), scale = (w - m) / span;
    canvas.style.height = h + "px";
    canvas.width = w * ratio; canvas.height = h * ratio;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = Math.min(12, high) + "px system-ui, sans-serif";
    rows.forEach((row, r) => {
      const y = top + r * high, ops = row.ops;
      let low = 0, up = ops.length;
      while (low < up) { const mid = (low + up) >> 1; if (ops[mid][1] < left) low = mid + 1; else up = mid; }
      for (let k = low; k < ops.length && ops[k][0] < left + span; k++) {
        const x = m + (ops[k][0] - left) * scale, to = m + (ops[k][1] - left) * scale;
        const from = Math.max(x, m), width = Math.max(0.5, to - from);
        context.fillStyle = colours[ops[k][2]];
        const thin = ops[k][2] === "A" ? 0.35 : 0.85;
        context.fillRect(from, y, width, high * thin);
        if (ops[k][4]) { context.fillStyle = hot; context.fillRect(from, y + high * 0.7, width, high * 0.25); }
        if (width > 34 && high > 10) { context.fillStyle = "#fff"; context.fillText(ops[k][2] + (ops[k][3] < 0 ? "" : ops[k][3]), from + 3, y + high * 0.65); }
      }
    });
    context.fillStyle = style.getPropertyValue("--fill"); context.fillRect(0, 0, m, h);
    context.fillStyle = ink;
    rows.forEach((row, r) => context.fillText(row.name, 2, top + r * high + high * 0.75, m - 6));
    context.font = "12px system-ui, sans-serif";
    const ticks = Math.max(2, Math.floor((w - m) / 110));
    for (let k = 0; k < ticks; k++) context.fillText((left + span * k / ticks).toPrecision(5) + " s", m + (w - m) * k / ticks, 13);
  };
  const ask = () => { limit(); if (!asked) { asked = true; requestAnimationFrame(draw); } };
  const zoom = (by, at) => { const was = left + span * at; span *= by; limit(); left = was - span * at; ask(); };
  const place = (event) => Math.max(0, event.offsetX - margin()) / (wide() - margin());
  const acts = { in: () => zoom(0.5, 0.5), out: () => zoom(2, 0.5), left: () => { left -= span / 4; ask(); }, right: () => { left += span / 4; ask(); }, all: () => { left = 0; span = end; ask(); } };
  document.querySelectorAll("button[data-act]").forEach((b) => b.addEventListener("click", () => acts[b.dataset.act]()));
  const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", "0": "all", Home: "all" };
  canvas.addEventListener("keydown", (event) => { if (keys[event.key] && !event.ctrlKey && !event.metaKey) { event.preventDefault(); acts[keys[event.key]](); } });
  canvas.addEventListener("wheel", (event) => { if (!event.ctrlKey && document.activeElement !== canvas) return; event.preventDefault(); zoom(Math.exp(event.deltaY / 400), place(event)); }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => { drag = [event.clientX, left]; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { drag = null; });
  canvas.addEventListener("pointercancel", () => { drag = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (drag) { left = drag[1] - (event.clientX - drag[0]) * span / (wide() - margin()); ask(); return; }
    const row = rows[Math.floor((event.offsetY - top) / high)], time = left + span * place(event);
    const op = row && row.ops.find((o) => o[0] <= time && time < o[1]);
    says.textContent = op ? row.name + ": " + data.names[op[2]] + (op[3] < 0 ? "" : " of microbatch " + op[3]) + ", " + op[0].toPrecision(5) + " to " + op[1].toPrecision(5) + " s" + (op[4] ? ", on the critical path" : "") : data.help;
  });
  addEventListener("resize", ask);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", ask);
  ask();
})();
