// The page itself: bytes over time, sizes, what follows the pointer, moving about, and the beginning of it all.

// ---- bytes over time

const curvePlot = new Plot("curve", MARGIN);

/// Least and most of a column in each pixel: what was before lasts until the next step.
function perPixel(plot, curve, column) {
    const wide = Math.ceil(plot.width);
    const least = new Float64Array(wide).fill(Infinity), most = new Float64Array(wide).fill(-1);
    const first = Math.max(placeOf(curve.event, view.from), 0);
    for (let at = first; at < curve.length && curve.event[at] <= view.until; at++) {
        const end = at + 1 < curve.length ? curve.event[at + 1] : curve.until;
        const left = clamp(Math.floor(plot.x(curve.event[at]) - plot.margin.left), 0, wide - 1);
        const right = clamp(Math.floor(plot.x(end) - plot.margin.left), left, wide - 1);
        for (let x = left; x <= right; x++) {
            least[x] = Math.min(least[x], column.least[at]);
            most[x] = Math.max(most[x], column.most[at]);
        }
    }
    return { least, most };
}

function drawCurves() {
    const plot = curvePlot, context = plot.begin();
    const shown = curves.filter((curve) => curve.isShown);
    plot.high = 1.05 * shown.reduce((high, curve) => curve.peak > high ? curve.peak : high, 1);
    context.save();
    context.beginPath();
    context.rect(plot.margin.left, plot.margin.top, plot.width, plot.height);
    context.clip();
    // The same requests are live in every pool, as long as it lasts.
    const live = shown.map((curve) => perPixel(plot, curve, curve.live).most);
    context.fillStyle = plot.ink("area");
    context.beginPath();
    context.moveTo(plot.margin.left, plot.y(0));
    for (let x = 0; x < plot.width; x++) {
        const y = plot.y(Math.max(0, ...live.map((most) => most[x])));
        context.lineTo(plot.margin.left + x, y);
        context.lineTo(plot.margin.left + x + 1, y);
    }
    context.lineTo(plot.margin.left + plot.width, plot.y(0));
    context.fill();
    for (const [place, curve] of shown.entries()) {
        const { least, most } = perPixel(plot, curve, curve.reserved);
        context.strokeStyle = PALETTE[curve.pool % PALETTE.length];
        // Lines that lie on each other: the first is seen on both sides of the next.
        context.lineWidth = 1.6 + 3 * (1 - (place + 1) / shown.length);
        context.lineJoin = "round";
        // What a pixel holds of ups and downs is a pale band, so that it does not hide what lies behind it; the line is the most.
        context.fillStyle = context.strokeStyle;
        context.globalAlpha = 0.18;
        most.forEach((bytes, x) => {
            if (bytes > least[x]) context.fillRect(plot.margin.left + x, plot.y(bytes), 1, plot.y(least[x]) - plot.y(bytes));
        });
        context.globalAlpha = 1;
        context.beginPath();
        most.forEach((bytes, x) => {
            if (bytes >= 0) context.lineTo(plot.margin.left + x + 0.5, plot.y(bytes));
        });
        context.stroke();
        const end = report.pools[curve.pool].out_of_memory;
        if (end) drawOutOfMemory(context, plot, curve, end);
    }
    context.restore();
    plot.drawIterations(context);
    plot.drawAxes(context);
}

function drawOutOfMemory(context, plot, curve, [event, bytes]) {
    const x = plot.x(event), y = plot.y(curve.length ? curve.reserved.most[curve.length - 1] : 0);
    context.lineWidth = 2.5;
    context.beginPath();
    for (const side of [-5, 5]) {
        context.moveTo(x - 5, y - side);
        context.lineTo(x + 5, y + side);
    }
    context.stroke();
    context.fillStyle = plot.ink("bad");
    context.textBaseline = "middle";
    context.textAlign = x > plot.margin.left + plot.width / 2 ? "right" : "left";
    const text = report.pools[curve.pool].name.slice(0, 30) + ": out of memory, " + size(bytes) + " asked for";
    context.fillText(text, context.textAlign === "right" ? x - 10 : x + 10, y + 17 + 15 * (curve.pool % 4));
}

function hoverCurves(pointer) {
    const plot = curvePlot, context = plot.begin(plot.hover), { isInside, event } = plot.at(pointer);
    if (!isInside) return hideTip();
    context.fillStyle = plot.ink("ink");
    context.fillRect(plot.x(event), plot.margin.top, 1, plot.height);
    const rows = [["", "live", "reserved"]];
    for (const curve of curves.filter((curve) => curve.isShown)) {
        const at = placeOf(curve.event, event), name = report.pools[curve.pool].name;
        if (event > curve.until) {
            rows.push([name, "out of memory", ""]);
        } else if (at < 0) {
            rows.push([name, "0 B", "0 B"]);
        } else {
            rows.push([name, ...[curve.live, curve.reserved].map(({ least, most }) => between(least[at], most[at]))]);
        }
    }
    showTip(pointer, whenText(event), rows);
}

// ---- sizes

function fillSizes() {
    const { name, sizes } = report.pools[map.pool], table = byId("sizes");
    byId("sizes-pool").textContent = name;
    const head = make("tr");
    head.append(...["size", "requests", "bytes, all together"].map((text) => make("th", text)));
    const most = [1, 2].map((column) => Math.max(...sizes.map((row) => row[column]), 1));
    table.replaceChildren(head, ...sizes.map((row) => {
        const line = make("tr");
        line.append(make("td", power(Math.log2(row[0])) + " – " + power(Math.log2(row[0]) + 1)));
        for (const [column, text] of [[1, count(row[1])], [2, size(row[2])]]) {
            const cell = make("td"), fill = make("span", "", "fill");
            fill.style.width = `calc((100% - 7em) * ${row[column] / most[column - 1]})`;
            if (row[column] > 0) cell.append(fill, text);
            line.append(cell);
        }
        return line;
    }));
}

// ---- what follows the pointer

function showTip(pointer, title, rows) {
    const tip = byId("tip"), table = make("table");
    for (const row of rows) {
        const line = make("tr");
        line.append(...row.map((cell) => make("td", String(cell))));
        table.append(line);
    }
    tip.replaceChildren(make("strong", title), table);
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const isRight = pointer.clientX + width + 24 > window.innerWidth;
    tip.style.left = Math.max(isRight ? pointer.clientX - width - 14 : pointer.clientX + 14, 4) + "px";
    tip.style.top = clamp(pointer.clientY + 14, 4, Math.max(window.innerHeight - height - 4, 4)) + "px";
}

function hideTip() {
    byId("tip").hidden = true;
    for (const plot of [curvePlot, mapPlot]) plot.begin(plot.hover);
}

// ---- moving about

const frame = { isScheduled: false, isMoving: false };

/// Draws everything in the next frame; what moves may be drawn roughly.
function repaint(isMoving = false) {
    frame.isMoving = isMoving;
    if (frame.isScheduled) return;
    frame.isScheduled = true;
    requestAnimationFrame(() => {
        frame.isScheduled = false;
        drawCurves();
        if (map) drawMap(frame.isMoving);
    });
}

/// Shows what is asked for, as far as there is something there.
function show({ from = view.from, until = view.until, low = view.low, high = view.high }) {
    const fit = (start, end, least, most) => {
        const length = clamp(end - start, Math.min(least, most), most), first = clamp(start, 0, most - length);
        return [first, first + length];
    };
    [view.from, view.until] = fit(from, until, 8, lastEvent);
    if (map) [view.low, view.high] = fit(low, high, 512, map.height);
    repaint(true);
}

function showEverything() {
    show({ from: 0, until: Infinity, low: 0, high: Infinity });
}

/// `factor` below 1 is closer.
function zoom(factor, { event, bytes }, inTime = true, inAddresses = true) {
    const time = inTime ? factor : 1, addresses = inAddresses ? factor : 1;
    show({
        from: event - (event - view.from) * time,
        until: event + (view.until - event) * time,
        low: bytes - (bytes - view.low) * addresses,
        high: bytes + (view.high - bytes) * addresses,
    });
}

/// By parts of what is shown.
function move(inTime, inAddresses) {
    const events = inTime * (view.until - view.from), bytes = inAddresses * (view.high - view.low);
    show({ from: view.from + events, until: view.until + events, low: view.low + bytes, high: view.high + bytes });
}

function press(key) {
    const middle = { event: (view.from + view.until) / 2, bytes: (view.low + view.high) / 2 };
    const moves = { ArrowLeft: [-0.25, 0], ArrowRight: [0.25, 0], ArrowUp: [0, 0.25], ArrowDown: [0, -0.25] };
    if (moves[key]) move(...moves[key]);
    else if (key === "+" || key === "=") zoom(0.6, middle);
    else if (key === "-") zoom(1 / 0.6, middle);
    else if (key === "0") showEverything();
    else return false;
    hideTip();
    return true;
}

function listenToMap() {
    const canvas = mapPlot.hover;
    let held = null;
    canvas.addEventListener("wheel", (event) => {
        event.preventDefault();
        // Shift turns the wheel sideways in some browsers.
        const turned = clamp((event.deltaY || event.deltaX) * (event.deltaMode === 1 ? 30 : 1), -200, 200);
        zoom(1.0022 ** turned, mapPlot.at(event), !event.altKey, !event.shiftKey);
        hideTip();
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
        if (event.button !== 0) return;
        canvas.setPointerCapture(event.pointerId);
        held = { x: event.clientX, y: event.clientY, view: { ...view } };
    });
    canvas.addEventListener("pointermove", (event) => {
        if (held && !event.buttons) held = null;
        if (!held) return hoverMap(event);
        const events = (held.x - event.clientX) / mapPlot.width * (held.view.until - held.view.from);
        const bytes = (event.clientY - held.y) / mapPlot.height * (held.view.high - held.view.low);
        const { from, until, low, high } = held.view;
        show({ from: from + events, until: until + events, low: low + bytes, high: high + bytes });
        hideTip();
    });
    canvas.addEventListener("pointerup", () => held = null);
    canvas.addEventListener("pointercancel", () => held = null);
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("dblclick", showEverything);
    canvas.addEventListener("keydown", (event) => {
        if (!event.ctrlKey && !event.metaKey && press(event.key)) event.preventDefault();
    });
    for (const button of document.querySelectorAll("#buttons button")) button.addEventListener("click", () => press(button.dataset.key));
}

function listenToCurves() {
    const canvas = curvePlot.hover;
    let start = null;
    canvas.addEventListener("pointerdown", (event) => {
        canvas.setPointerCapture(event.pointerId);
        start = curvePlot.at(event).event;
    });
    canvas.addEventListener("pointermove", (event) => {
        hoverCurves(event);
        if (start === null) return;
        const context = curvePlot.hover.getContext("2d"), [left, right] = [start, curvePlot.at(event).event].map((event) => curvePlot.x(event));
        context.globalAlpha = 0.25;
        context.fillStyle = curvePlot.ink("accent");
        context.fillRect(left, curvePlot.margin.top, right - left, curvePlot.height);
        context.globalAlpha = 1;
    });
    canvas.addEventListener("pointerup", (event) => {
        const end = curvePlot.at(event).event, isDrag = start !== null && Math.abs(curvePlot.x(end) - curvePlot.x(start)) > 4;
        if (isDrag) show({ from: Math.min(start, end), until: Math.max(start, end) });
        start = null;
        hideTip();
    });
    canvas.addEventListener("pointercancel", () => start = null);
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("dblclick", showEverything);
}

// ---- the beginning

const maps = [];

/// The map of a pool, unpacked when it is first wanted.
function mapOf(pool) {
    maps[pool] ??= unpack("map-" + pool).then((columns) => readMap(columns, pool));
    return maps[pool];
}

async function choosePool(pool) {
    const chosen = await mapOf(pool);
    if (Number(byId("pool").value) !== pool) return;
    map = chosen;
    Object.assign(view, { low: 0, high: map.height });
    byId("words").textContent = report.pools[pool].words;
    colourMap();
    fillSizes();
    repaint();
}

function offerPools() {
    curves.forEach((curve) => {
        const label = make("label"), box = make("input"), line = make("i", "", "swatch stroke");
        Object.assign(box, { type: "checkbox", checked: true });
        box.addEventListener("change", () => {
            curve.isShown = box.checked;
            repaint();
        });
        line.style.background = PALETTE[curve.pool % PALETTE.length];
        label.append(box, line, report.pools[curve.pool].name + " reserved");
        byId("pools").append(label);
        // A pool of which only the curve is known has no addresses to show.
        if (report.pools[curve.pool].ranges.length > 0) byId("pool").append(new Option(report.pools[curve.pool].name, curve.pool));
    });
    byId("pools").append(swatch("var(--area)", "live"));
}

function fail(error) {
    document.body.dataset.error = String(error);
    byId("error").textContent = "This page could not be drawn: " + error;
    byId("error").hidden = false;
}

async function start() {
    window.addEventListener("error", (event) => fail(event.message));
    window.addEventListener("unhandledrejection", (event) => fail(event.reason));
    if (!window.DecompressionStream) throw new Error("the browser is too old; Chrome 80, Firefox 113 and Safari 16.4 can");
    const columns = await unpack("curves");
    requests = readRequests(columns);
    curves = report.pools.map((_, pool) => readCurve(columns, pool));
    for (const curve of curves) curve.peak = curve.reserved.most.reduce((peak, bytes) => Math.max(peak, bytes), 0);
    for (const curve of curves) curve.peak = curve.live.most.reduce((peak, bytes) => Math.max(peak, bytes), curve.peak);
    // Where every pool has run out of memory, nothing comes after that.
    lastEvent = Math.min(view.until, Math.ceil(1.04 * curves.reduce((last, curve) => Math.max(last, curve.until), 1)));
    view.until = lastEvent;
    offerPools();
    listenToCurves();
    listenToMap();
    byId("pool").addEventListener("change", () => choosePool(Number(byId("pool").value)).catch(fail));
    byId("colour").addEventListener("change", () => {
        colourMap();
        repaint();
    });
    new ResizeObserver(() => repaint()).observe(mapPlot.canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => repaint());
    drawCurves();
    const offered = [...byId("pool").options].map((option) => Number(option.value));
    if (offered.length > 0) {
        const ours = offered.find((pool) => report.pools[pool].name === "stitchd") ?? offered[0];
        byId("pool").value = ours;
        await choosePool(ours);
        drawMap();
    }
    document.body.dataset.ready = lastDrawn.rectangles;
    // The other pools wait behind the first picture; what is wrong with them shows now, not when they are chosen.
    let held = 0;
    for (let pool = 0; pool < report.pools.length; pool++) held += (await mapOf(pool)).length;
    document.body.dataset.held = held;
}

start().catch(fail);
