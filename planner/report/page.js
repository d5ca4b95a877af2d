"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const canvas = document.getElementById("timeline"), says = document.getElementById("says");
  const context = canvas.getContext("2d"), rows = data.devices, end = data.end_s || 1;
  const colours = data.colours, high = Math.max(9, Math.min(20, 1200 / rows.length)), top = 20;
  const BIN = 4; // pixels of a column where operations are narrower than pixels
  let left = 0, span = end, asked = false, drag = null;
  const wide = () => canvas.clientWidth || 600;
  const margin = () => Math.min(190, wide() * 0.38);
  const limit = () => {
    span = Math.min(end, Math.max(end * 1e-6, span));
    left = Math.min(end - span, Math.max(0, left));
  };
  // operations of a row that are visible; they are sorted by their ends
  const visible = (ops) => {
    let low = 0, up = ops.length;
    while (low < up) { const mid = (low + up) >> 1; if (ops[mid][1] < left) low = mid + 1; else up = mid; }
    return ops.slice(low).filter((op) => op[0] < left + span);
  };
  const narrow = (ops, scale) => {
    const lengths = ops.filter((op) => op[2] !== "A").map((op) => op[1] - op[0]).sort((a, b) => a - b);
    return lengths.length > 0 && lengths[lengths.length >> 1] * scale < 2;
  };
  // the share of each column in which the device does each kind of operation, as stacked bars
  const drawShares = (ops, m, y, scale) => {
    const columns = Math.ceil((wide() - m) / BIN), kinds = Object.keys(colours).filter((k) => k !== "A");
    const share = Object.fromEntries(kinds.map((k) => [k, new Float64Array(columns + 1)]));
    ops.forEach((op) => {
      if (op[2] === "A") return;
      const from = Math.max(0, (op[0] - left) * scale / BIN), to = Math.min(columns, (op[1] - left) * scale / BIN);
      for (let c = Math.floor(from); c < to; c++) share[op[2]][c] += Math.min(c + 1, to) - Math.max(c, from);
    });
    for (let c = 0; c < columns; c++) {
      let foot = y + high * 0.7;
      kinds.forEach((k) => {
        const tall = share[k][c] * high * 0.65;
        context.fillStyle = colours[k]; context.fillRect(m + c * BIN, foot - tall, BIN, tall);
        foot -= tall;
      });
    }
  };
  const drawBar = (op, m, y, scale, hot) => {
    const from = Math.max(m + (op[0] - left) * scale, m), to = m + (op[1] - left) * scale;
    const width = Math.max(0.5, to - from), averages = op[2] === "A";
    context.fillStyle = colours[op[2]];
    if (averages) context.fillRect(from, y + high * 0.74, width, high * 0.18);
    else context.fillRect(from, y + high * 0.05, width, high * 0.65);
    if (op[4]) { context.fillStyle = hot; context.fillRect(from, y + high * 0.55, width, high * 0.15); }
    if (!averages && width > 34 && high > 10) {
      context.fillStyle = "#fff";
      context.fillText(op[2] + (op[3] < 0 ? "" : op[3]), from + 3, y + high * 0.6);
    }
  };
  const drawTicks = (m, w) => {
    const least = span / Math.max(2, Math.floor((w - m) / 80)), power = 10 ** Math.floor(Math.log10(least));
    const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= least * 0.999);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    for (let k = Math.ceil(left / step - 1e-9); k * step <= left + span; k++) {
      const x = m + (k * step - left) / span * (w - m), text = (k * step).toFixed(digits) + " s";
      context.fillRect(x, top - 5, 1, 5);
      if (x + context.measureText(text).width < w) context.fillText(text, x, 12);
    }
  };
  const draw = () => {
    asked = false;
    const style = getComputedStyle(document.documentElement), ratio = devicePixelRatio || 1;
    const ink = style.getPropertyValue("--ink"), hot = style.getPropertyValue("--hot");
    const line = style.getPropertyValue("--line");
    const w = wide(), h = top + high * rows.length, m = margin(), scale = (w - m) / span;
    canvas.style.height = h + "px";
    canvas.width = w * ratio; canvas.height = h * ratio;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = Math.min(12, high - 1) + "px system-ui, sans-serif";
    const shown = rows.map((row) => visible(row.ops)), strips = narrow(shown.flat(), scale);
    rows.forEach((row, r) => {
      const y = top + r * high;
      if (strips) drawShares(shown[r], m, y, scale);
      shown[r].forEach((op) => { if (!strips || op[2] === "A") drawBar(op, m, y, scale, hot); });
      if (strips) { context.fillStyle = hot; shown[r].forEach((op) => { if (op[4]) context.fillRect(Math.max(m, m + (op[0] - left) * scale), y + high * 0.7, Math.max(1, (op[1] - op[0]) * scale), 1.5); }); }
    });
    context.fillStyle = style.getPropertyValue("--fill"); context.fillRect(0, 0, m, h);
    rows.forEach((row, r) => {
      const y = top + r * high;
      if (row.stage !== null) { context.fillStyle = data.stages[row.stage]; context.fillRect(0, y + 1, 4, high - 2); }
      if (r === 0 || rows[r - 1].stage !== row.stage) { context.fillStyle = line; context.fillRect(0, y, w, 1); }
      const idle = "idle " + Math.round(100 * row.idle) + "%", room = m > 120 ? context.measureText("idle 100%").width : 0;
      context.fillStyle = ink;
      context.fillText((row.stage === null ? "" : row.stage + "  ") + row.name, 8, y + high * 0.75, m - room - 18);
      if (room) context.fillText(idle, m - room - 6, y + high * 0.75);
    });
    context.fillStyle = ink; context.font = "12px system-ui, sans-serif";
    drawTicks(m, w);
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
