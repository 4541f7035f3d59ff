"use strict";
// The neuron explorer: unpacks the arrays of `explorer.py`, and draws with SVG made by the DOM (no markup from data).
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const WIDTH = 800, HEIGHT = 220, LEFT = 48, BOTTOM = 28, TOP = 8;

  const bytes = (packed) => Uint8Array.from(atob(packed.data), (c) => c.charCodeAt(0));
  const value = (packed, code) =>
    code === 255 ? NaN : packed.low + (code / 254) * (packed.high - packed.low);

  function element(name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  // The smallest and the largest finite value of lines, a little apart where they are one.
  function range(lines) {
    const finite = lines.flat().filter(Number.isFinite);
    const low = Math.min(...finite), high = Math.max(...finite);
    return finite.length === 0 ? [0, 1] : high - low > 1e-6 ? [low, high] : [low - 0.5, high + 0.5];
  }

  // lines: arrays of values at `steps`; titles: the tooltip of each line
  function plot(place, steps, lines, low, high, kind, titles) {
    const last = steps[steps.length - 1] || 1;
    const x = (step) => LEFT + (step / last) * (WIDTH - LEFT - 8);
    const y = (v) => TOP + (1 - (v - low) / (high - low || 1)) * (HEIGHT - TOP - BOTTOM);
    const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
    svg.append(element("path", { class: "frame", d: `M${LEFT} ${TOP}V${HEIGHT - BOTTOM}H${WIDTH - 8}` }));
    for (const v of [low, (low + high) / 2, high])
      svg.append(element("text", { x: LEFT - 6, y: y(v) + 4, "text-anchor": "end" }, v.toFixed(2)));
    for (const step of [0, last])
      svg.append(element("text", { x: x(step), y: HEIGHT - 10, "text-anchor": "middle" }, `step ${step}`));
    if (low < 0 && high > 0) svg.append(element("path", { class: "zero", d: `M${LEFT} ${y(0)}H${WIDTH - 8}` }));
    lines.forEach((line, i) => {
      let d = "", pen = false;
      line.forEach((v, k) => {
        if (Number.isFinite(v)) d += `${pen ? "L" : "M"}${x(steps[k]).toFixed(1)} ${y(v).toFixed(1)}`;
        pen = Number.isFinite(v);
      });
      const path = element("path", { class: kind, d });
      if (titles) path.append(element("title", {}, titles[i]));
      svg.append(path);
    });
    place.replaceChildren(svg);
  }

  function showActive(form, data, codes, neuron) {
    const [events, width] = data.shape;
    const line = Array.from({ length: events }, (_, k) => value(data, codes[k * width + neuron]));
    const top = Math.max(0.05, range([line])[1]); // of this neuron; a code is 0.004
    plot(form.querySelector("[data-plot=active]"), data.steps, [line], 0, Math.min(1, top), "active");
    return line[events - 1];
  }

  function showTrace(form, data, codes, neuron) {
    const place = form.querySelector("[data-plot=trace]");
    const figure = place.closest("figure");
    figure.hidden = !data;
    if (!data) return;
    const [events, tokens, width] = data.shape;
    const at = data.neurons.indexOf(neuron);
    if (at < 0) {
      place.replaceChildren(`traces are in this report for the neurons ${data.neurons.join(", ")}`);
      return;
    }
    const own = { low: data.low[at], high: data.high[at] };
    const lines = Array.from({ length: tokens }, (_, t) =>
      Array.from({ length: events }, (_, k) => value(own, codes[(k * tokens + t) * width + at])));
    plot(place, data.steps, lines, ...range(lines), "token", data.tokens);
  }

  function showTop(form, data, neuron) {
    const place = form.querySelector(".top");
    place.hidden = !data;
    if (!data) return;
    const table = document.createElement("table");
    const caption = table.createCaption();
    caption.textContent = `tokens of the scan at step ${data.step} that activate it most`;
    const head = table.createTHead().insertRow();
    for (const words of ["post-activation", "token, with its context"]) {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = words;
      head.append(cell);
    }
    const body = table.createTBody();
    data.position[neuron].forEach((position, rank) => {
      const row = body.insertRow();
      row.insertCell().textContent = data.value[neuron][rank].toFixed(2);
      const cell = row.insertCell();
      const [before, token, after] = data.context[position] || ["", `position ${position}`, ""];
      const mark = document.createElement("mark");
      mark.textContent = token;
      cell.append(before, mark, after);
    });
    place.replaceChildren(table);
  }

  for (const form of document.querySelectorAll("form.explorer")) {
    const layers = JSON.parse(document.getElementById(form.dataset.source).textContent).layers;
    const unpacked = {};
    for (const label in layers) {
      form.elements.layer.add(new Option(label));
      unpacked[label] = {};
      for (const kind of ["active", "trace"])
        if (layers[label][kind]) unpacked[label][kind] = bytes(layers[label][kind]);
    }
    const show = () => {
      const label = form.elements.layer.value;
      const width = layers[label].active.shape[1];
      const field = form.elements.neuron;
      field.max = width - 1;
      const neuron = Math.min(Math.max(0, Math.trunc(field.value) || 0), width - 1);
      field.value = neuron;
      const end = showActive(form, layers[label].active, unpacked[label].active, neuron);
      showTrace(form, layers[label].trace, unpacked[label].trace, neuron);
      showTop(form, layers[label].top, neuron);
      form.querySelector(".note").textContent =
        `neuron ${neuron} of ${width}: ${Number.isFinite(end) ? (100 * end).toFixed(1) + " % active at the end" : "no tokens"}`;
    };
    const move = (by) => () => {
      form.elements.neuron.value = Number(form.elements.neuron.value) + by;
      show();
    };
    form.elements.previous.addEventListener("click", move(-1));
    form.elements.next.addEventListener("click", move(1));
    form.addEventListener("change", show);
    form.addEventListener("submit", (event) => event.preventDefault());
    // Begin at a neuron of which everything is shown.
    const traced = layers[form.elements.layer.value].trace;
    if (traced) form.elements.neuron.value = traced.neurons[0];
    show();
  }
})();
