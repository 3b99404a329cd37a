// Addresses over time: a rectangle for each allocation, and a haze for those that the page does not carry one by one.

const mapPlot = new Plot("map", MARGIN);

/// Colours by what is chosen, and what they mean. Most bytes × events first where there are more kinds than colours.
function colourMap() {
    const mode = byId("colour").value, { request, bytes, from, until } = map;
    let kindOf, nameOf, palette = PALETTE;
    if (mode === "size") {
        const classOf = (bytes) => Math.floor(Math.log2(Math.max(bytes, 1)));
        const least = Math.max(classOf(bytes.reduce((most, bytes) => Math.max(most, bytes), 0)) - SIZES.length + 1, 0);
        kindOf = (at) => Math.max(classOf(bytes[at]) - least, 0);
        nameOf = (kind) => kind === 0 ? "below " + power(least + 1) : power(kind + least) + " – " + power(kind + least + 1);
        palette = SIZES;
    } else if (mode === "phase") {
        kindOf = (at) => requests.phase[request[at]];
        nameOf = (kind) => report.phases[kind];
    } else if (mode === "module") {
        // Layers differ in their numbers only; what one wants to see is what kind of layer it is.
        const names = report.modules.map((name) => name.replace(/\d+/g, "*") || "no module");
        const kinds = [...new Set(names)], kindOfModule = names.map((name) => kinds.indexOf(name));
        kindOf = (at) => kindOfModule[requests.module[request[at]]];
        nameOf = (kind) => kinds[kind];
    } else {
        kindOf = (at) => iterationAt(from[at]) ?? 0;
        nameOf = (kind) => "iteration " + kind;
    }
    const areas = new Map();
    for (let at = 0; at < map.length; at++) {
        const kind = kindOf(at);
        areas.set(kind, (areas.get(kind) || 0) + bytes[at] * (until[at] - from[at]));
    }
    const isOrdered = mode === "size" || mode === "phase";
    const kinds = [...areas.keys()].sort((a, b) => mode === "module" ? areas.get(b) - areas.get(a) : a - b);
    const isFull = mode === "module" && kinds.length > palette.length;
    const colourOf = new Map(kinds.map((kind, place) => {
        if (isFull && place >= palette.length) return [kind, palette.length];
        return [kind, (isOrdered ? kind : place) % palette.length];
    }));
    for (let at = 0; at < map.length; at++) map.colour[at] = colourOf.get(kindOf(at));
    map.colours = [...palette, OTHER].map(channelsOf);

    const legend = kinds.slice(0, palette.length).map((kind) => swatch(palette[colourOf.get(kind)], nameOf(kind)));
    const others = kinds.length - palette.length;
    if (others > 0) legend.push(isFull ? swatch(OTHER, count(others) + " other kinds") : make("span", "… and so on, " + count(others) + " more in the same colours"));
    if (map.haze.wide) legend.push(swatch(OTHER, "haze: not shown one by one"));
    byId("colours").replaceChildren(...legend);
}

function swatch(colour, text, className = "swatch") {
    const item = make("span"), box = make("i", "", className);
    box.style.background = colour;
    item.append(box, text);
    return item;
}

function channelsOf(colour) {
    return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
}

/// Pixels that gather what covers them. Allocations never overlap, so that a pixel is covered once at most, and a thousand allocations inside
/// one pixel look as full as they are.
class Raster {
    resize(wide, high) {
        if (this.wide === wide && this.high === high) return;
        Object.assign(this, { wide, high, image: new ImageData(wide, high) });
        // Column after column, red, green, blue and cover: most rectangles are thin and high.
        this.sums = new Float32Array(4 * wide * high);
    }

    /// `part` of every place there, if it is haze only of what is left of it: haze is known roughly, rectangles exactly.
    cover(left, right, top, bottom, [red, green, blue], part = 1, isHaze = false) {
        const { sums, high } = this;
        top = Math.max(top, 0);
        bottom = Math.min(bottom, high);
        const firstRow = Math.floor(top), lastColumn = Math.min(Math.ceil(right), this.wide);
        for (let column = Math.max(Math.floor(left), 0); column < lastColumn; column++) {
            const partOfColumn = part * (Math.min(right, column + 1) - Math.max(left, column));
            let at = 4 * (column * high + firstRow);
            for (let row = firstRow; row < bottom; row++) {
                let cover = partOfColumn;
                if (row < top || row + 1 > bottom) cover *= Math.min(bottom, row + 1) - Math.max(top, row);
                if (isHaze) cover *= Math.max(1 - sums[at + 3], 0);
                sums[at++] += cover * red;
                sums[at++] += cover * green;
                sums[at++] += cover * blue;
                sums[at++] += cover;
            }
        }
    }

    /// What was gathered, over a ground. A little more than is covered, or single allocations could not be seen from afar.
    paint(context, [red, green, blue]) {
        const { sums, wide, high } = this, pixels = new Uint32Array(this.image.data.buffer);
        const strength = Float32Array.from({ length: 257 }, (_, cover) => (cover / 256) ** 0.65);
        pixels.fill(0xff000000 | blue << 16 | green << 8 | red);
        for (let column = 0, at = 0; column < wide; column++) {
            for (let row = 0; row < high; row++, at += 4) {
                const cover = sums[at + 3];
                if (cover === 0) continue;
                const strong = strength[cover < 1 ? Math.ceil(cover * 256) : 256], over = strong / cover, under = 1 - strong;
                pixels[row * wide + column] = 0xff000000 | (sums[at + 2] * over + blue * under) << 16
                    | (sums[at + 1] * over + green * under) << 8 | (sums[at] * over + red * under);
            }
        }
        context.putImageData(this.image, 0, 0);
    }
}

const raster = new Raster();

/// The last picture of the map that was drawn from its rectangles: of which view, how many there were, how long it took.
const lastDrawn = { view: null, canvas: document.createElement("canvas"), rectangles: 0, milliseconds: 0 };

/// Draws the map. While it moves, and if that would take too long, it is the last picture, stretched; drawn anew as soon as it rests.
function drawMap(isMoving) {
    const plot = mapPlot, context = plot.begin();
    Object.assign(plot, { low: view.low, high: view.high });
    if (isMoving && lastDrawn.milliseconds > 30 && lastDrawn.view.map === map && performance.now() - lastDrawn.at < 250) {
        stretchLastDrawn(context);
        clearTimeout(lastDrawn.timer);
        lastDrawn.timer = setTimeout(() => repaint(), 120);
    } else {
        drawRectangles(context);
    }
    drawCuts(context);
    plot.drawIterations(context);
    plot.drawAxes(context);
    const part = (view.until - view.from) / lastEvent;
    byId("window").textContent = part > 0.999 ? count(lastEvent) + " events" + (lastEvent < report.events ? " of " + count(report.events) : "")
        : "events " + count(view.from) + " – " + count(view.until) + " of " + count(report.events);
}

function stretchLastDrawn(context) {
    const { margin, width, height } = mapPlot, last = lastDrawn.view;
    const left = mapPlot.x(last.from), top = mapPlot.y(last.high);
    context.save();
    context.beginPath();
    context.rect(margin.left, margin.top, width, height);
    context.clip();
    context.drawImage(lastDrawn.canvas, left, top, mapPlot.x(last.until) - left, mapPlot.y(last.low) - top);
    context.restore();
}

function drawRectangles(context) {
    const { scale, margin, width, height } = mapPlot, started = performance.now();
    const canvas = lastDrawn.canvas;
    raster.resize(Math.ceil(width * scale), Math.ceil(height * scale));
    raster.sums.fill(0);
    const perEvent = raster.wide / (view.until - view.from), perByte = raster.high / (view.high - view.low);
    lastDrawn.rectangles = coverRectangles(perEvent, perByte);
    if (map.haze.wide) coverHaze(perEvent, perByte);
    Object.assign(canvas, { width: raster.wide, height: raster.high });
    raster.paint(canvas.getContext("2d"), channelsOf(mapPlot.ink("ground")));
    context.drawImage(canvas, margin.left, margin.top, raster.wide / scale, raster.high / scale);
    Object.assign(lastDrawn, { view: { ...view, map }, milliseconds: performance.now() - started, at: performance.now() });
}

/// Gathers every rectangle in view, and says how many there are.
function coverRectangles(perEvent, perByte) {
    const { from, until, offset, bytes, colour, colours } = map;
    const dark = colours.map((channels) => channels.map((channel) => channel * 0.62));
    let drawn = 0;
    for (let at = 0; at < map.length && from[at] < view.until; at++) {
        if (until[at] <= view.from || offset[at] >= view.high || offset[at] + bytes[at] <= view.low) continue;
        drawn++;
        const left = (from[at] - view.from) * perEvent, right = (until[at] - view.from) * perEvent;
        const bottom = (view.high - offset[at]) * perByte, top = bottom - bytes[at] * perByte;
        if (right - left < 4 || bottom - top < 4) {
            raster.cover(left, right, top, bottom, colours[colour[at]]);
            continue;
        }
        // Neighbours of one colour are kept apart by an edge.
        raster.cover(left, left + 0.8, top, bottom, dark[colour[at]]);
        raster.cover(left + 0.8, right, bottom - 0.8, bottom, dark[colour[at]]);
        raster.cover(left + 0.8, right, top, bottom - 0.8, colours[colour[at]]);
    }
    return drawn;
}

function coverHaze(perEvent, perByte) {
    const { wide, high, full } = map.haze, grey = channelsOf(OTHER);
    const events = report.events / wide, bytes = map.height / high;
    for (let row = Math.floor(view.low / bytes); row < high && row * bytes < view.high; row++) {
        for (let column = Math.floor(view.from / events); column < wide && column * events < view.until; column++) {
            const part = full[row * wide + column] / 65535;
            if (part === 0) continue;
            const left = (column * events - view.from) * perEvent, bottom = (view.high - row * bytes) * perByte;
            raster.cover(left, left + events * perEvent, bottom - bytes * perByte, bottom, grey, part, true);
        }
    }
}

/// A line wherever addresses were cut out, unless they are too many to be told apart.
function drawCuts(context) {
    const plot = mapPlot;
    context.fillStyle = plot.ink("quiet");
    const cuts = map.ranges.filter(({ offset }) => offset > view.low && offset < view.high).map(({ offset }) => Math.round(plot.y(offset)));
    // Many lines would hide what they lie over: then they are marks at the edge.
    const isMany = cuts.length > plot.height / 24;
    let last = Infinity;
    for (const y of cuts) {
        if (last - y < 3) continue;
        context.globalAlpha = isMany ? 1 : 0.45;
        context.fillRect(isMany ? plot.margin.left + plot.width : plot.margin.left, y, isMany ? 6 : plot.width, 0.7);
        last = y;
    }
    context.globalAlpha = 1;
}

/// The allocation at a place, or the largest of those that are too thin to be met there.
function rectangleAt({ event, bytes }) {
    const nearEvents = 2 * (view.until - view.from) / mapPlot.width, nearBytes = 2 * (view.high - view.low) / mapPlot.height;
    let found = -1;
    for (let at = 0; at < map.length && map.from[at] < event + nearEvents; at++) {
        const low = map.offset[at], high = low + map.bytes[at];
        if (map.until[at] < event - nearEvents || low > bytes + nearBytes || high < bytes - nearBytes) continue;
        if (map.from[at] <= event && event < map.until[at] && low <= bytes && bytes < high) return at;
        if (found < 0 || map.bytes[at] > map.bytes[found]) found = at;
    }
    return found;
}

function hoverMap(pointer) {
    const plot = mapPlot, context = plot.begin(plot.hover), place = plot.at(pointer);
    if (!place.isInside) return hideTip();
    const at = rectangleAt(place);
    if (at < 0) return hoverHaze(pointer, place);
    const left = Math.max(plot.x(map.from[at]), plot.margin.left), right = Math.min(plot.x(map.until[at]), plot.margin.left + plot.width);
    const top = Math.max(plot.y(map.offset[at] + map.bytes[at]), plot.margin.top);
    const bottom = Math.min(plot.y(map.offset[at]), plot.margin.top + plot.height);
    context.strokeStyle = plot.ink("ink");
    context.lineWidth = 2;
    context.strokeRect(left - 1, top - 1, Math.max(right - left, 1) + 2, Math.max(bottom - top, 1) + 2);

    const request = map.request[at], microbatch = requests.microbatch[request], iteration = iterationAt(map.from[at]);
    const end = map.isFreed[at] ? count(map.until[at]) + " (" + count(map.until[at] - map.from[at]) + " events)" : report.pools[map.pool].out_of_memory ? "out of memory" : "the end: never freed";
    const endIteration = iterationAt(map.until[at]);
    const rows = [["module", report.modules[requests.module[request]] || "–"], ["phase", report.phases[requests.phase[request]]]];
    if (microbatch > 0) rows.push(["micro-batch", count(microbatch - 1)]);
    if (iteration !== null) rows.push(["iteration", map.isFreed[at] && endIteration !== iteration ? iteration + ", freed in " + endIteration : iteration]);
    rows.push(["lifetime", "event " + count(map.from[at]) + " to " + end], ["address", addressText(map.offset[at])]);
    showTip(pointer, size(map.bytes[at]) + " (" + count(map.bytes[at]) + " bytes)", rows);
}

function hoverHaze(pointer, { event, bytes }) {
    const { wide, high, full } = map.haze;
    const column = clamp(Math.floor(event / report.events * wide), 0, wide - 1), row = clamp(Math.floor(bytes / map.height * high), 0, high - 1);
    const part = wide ? full[row * wide + column] / 65535 : 0;
    const rows = [["address", addressText(bytes)], ["time", whenText(event)]];
    if (part > 0) rows.push(["not shown one by one", (100 * part).toFixed(1) + " % of this place"]);
    showTip(pointer, part > 0 ? "haze" : "nothing here", rows);
}

function addressText(offset) {
    const range = map.ranges[Math.max(placeOf(map.ranges.map((range) => range.offset), offset), 0)];
    return range ? "0x" + (range.start + BigInt(Math.max(Math.floor(offset - range.offset), 0))).toString(16) : "–";
}
