"use strict";
// What the page of a replay carries, read, and what every picture of it needs: words, numbers, axes. map.js and page.js follow in the same
// script.
//
// The outline is JSON; long columns of numbers are base64 of zlib, in elements of their own (src/replay/report writes them). Text from
// outside is put into the page as text only, never as HTML.

const PALETTE = ["#4c86c6", "#f0883e", "#3fa66b", "#d9534f", "#9a6fc4", "#2aa5a5", "#b0783f", "#e377a8", "#a3a83a", "#6f74d9", "#5ec2f0", "#c9a227"];
const SIZES = ["#6b4fa0", "#5a63b5", "#447fbe", "#2f98b3", "#2bac96", "#4fbd75", "#8ac850", "#c9cb3d", "#f0b92d", "#f08a2c"];
const OTHER = "#8b929c";
const MARGIN = { left: 108, right: 34, top: 20, bottom: 40 };

const report = JSON.parse(byId("report").textContent);
// What the map shows: a stretch of time, and of the used addresses. The curve shows the same stretch of time.
const view = { from: 0, until: Math.max(report.events, 1), low: 0, high: 1 };
let lastEvent = view.until;
let curves = [];
let requests = null;
let map = null;

// ---- words and numbers

function byId(id) {
    return document.getElementById(id);
}

function make(tag, text = "", className = "") {
    const element = document.createElement(tag);
    element.textContent = text;
    element.className = className;
    return element;
}

function count(number) {
    return Math.round(number).toLocaleString("en-US");
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

function unitOf(bytes) {
    return Math.min(Math.floor(Math.log2(Math.max(bytes, 1)) / 10), UNITS.length - 1);
}

function size(bytes) {
    const unit = unitOf(bytes);
    return (bytes / 1024 ** unit).toFixed([0, 1, 1, 2, 2, 2][unit]) + " " + UNITS[unit];
}

/// A power of two.
function power(exponent) {
    return 2 ** (exponent % 10) + " " + UNITS[Math.floor(exponent / 10)];
}

function between(least, most) {
    return size(least) === size(most) ? size(most) : size(least) + " – " + size(most);
}

function clamp(number, least, most) {
    return Math.min(Math.max(number, least), most);
}

/// The last place whose entry is not after `wanted`, or -1.
function placeOf(column, wanted) {
    let low = 0, high = column.length;
    while (low < high) {
        const middle = (low + high) >> 1;
        if (column[middle] <= wanted) low = middle + 1; else high = middle;
    }
    return low - 1;
}

const iterationStarts = report.iterations.map(([event]) => event);

function iterationAt(event) {
    const place = placeOf(iterationStarts, event);
    return place < 0 ? null : report.iterations[place][1];
}

function whenText(event) {
    const iteration = iterationAt(event);
    return "event " + count(Math.floor(event)) + (iteration === null ? "" : ", iteration " + iteration);
}

// ---- reading columns

async function unpack(id) {
    const element = byId(id);
    const text = atob(element.textContent);
    element.remove();
    const packed = new Uint8Array(text.length);
    for (let at = 0; at < text.length; at++) packed[at] = text.charCodeAt(at);
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Columns(new Uint8Array(await new Response(stream).arrayBuffer()));
}

class Columns {
    constructor(bytes) {
        this.bytes = bytes;
        this.at = 0;
    }

    number() {
        let number = 0, unit = 1;
        while (this.at < this.bytes.length) {
            const byte = this.bytes[this.at++];
            number += (byte & 127) * unit;
            if (byte < 128) return number;
            unit *= 128;
        }
        throw new Error("the page ends early: it was cut off");
    }

    numbers(column) {
        for (let at = 0; at < column.length; at++) column[at] = this.number();
        return column;
    }

    differences(column) {
        let last = 0;
        for (let at = 0; at < column.length; at++) {
            const number = this.number();
            last += number % 2 ? -(number + 1) / 2 : number / 2;
            column[at] = last;
        }
        return column;
    }
}

function readRequests(columns) {
    const length = columns.number();
    return {
        phase: columns.numbers(new Uint8Array(length)),
        module: columns.numbers(new Uint32Array(length)),
        microbatch: columns.numbers(new Float64Array(length)),
    };
}

function readCurve(columns, pool) {
    const length = columns.number();
    const curve = { pool, isShown: true, length, event: columns.differences(new Float64Array(length)) };
    for (const kind of ["live", "reserved"]) {
        const least = columns.differences(new Float64Array(length));
        const most = columns.numbers(new Float64Array(length));
        for (let at = 0; at < length; at++) most[at] += least[at];
        curve[kind] = { least, most };
    }
    const end = report.pools[pool].out_of_memory;
    curve.until = end ? end[0] : Math.max(report.events, 1);
    return curve;
}

function readMap(columns, pool) {
    const length = columns.number();
    const from = columns.differences(new Float64Array(length));
    const until = columns.numbers(new Float64Array(length));
    const isFreed = new Uint8Array(length);
    for (let at = 0; at < length; at++) {
        isFreed[at] = until[at] % 2;
        until[at] = Math.min(from[at] + Math.floor(until[at] / 2), report.pools[pool].out_of_memory?.[0] ?? Infinity);
    }
    const offset = columns.differences(new Float64Array(length));
    const bytes = columns.numbers(new Float64Array(length));
    const request = columns.differences(new Uint32Array(length));
    const haze = { wide: columns.number(), high: columns.number() };
    haze.full = columns.numbers(new Uint16Array(haze.wide * haze.high));
    let height = 0;
    const ranges = report.pools[pool].ranges.map(([start, len]) => {
        const range = { start: BigInt(start), offset: height };
        height += len;
        return range;
    });
    const colour = new Uint8Array(length);
    return { pool, length, from, until, isFreed, offset, bytes, request, haze, ranges, height: Math.max(height, 1), colour, colours: [] };
}

// ---- a plot: a canvas with axes, and one over it for what follows the pointer

class Plot {
    constructor(id, margin) {
        this.canvas = byId(id);
        this.hover = byId(id + "-hover");
        this.margin = margin;
        this.low = 0;
        this.high = 1;
    }

    begin(canvas = this.canvas) {
        this.scale = Math.min(window.devicePixelRatio || 1, 2);
        const box = this.canvas.parentElement.getBoundingClientRect();
        this.width = Math.max(box.width - this.margin.left - this.margin.right, 10);
        this.height = Math.max(box.height - this.margin.top - this.margin.bottom, 10);
        const wide = Math.round(box.width * this.scale), high = Math.round(box.height * this.scale);
        if (canvas.width !== wide || canvas.height !== high) {
            canvas.width = wide;
            canvas.height = high;
        }
        const context = canvas.getContext("2d");
        context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
        context.clearRect(0, 0, box.width, box.height);
        context.font = "12px system-ui, sans-serif";
        const style = getComputedStyle(document.documentElement);
        this.ink = (name) => style.getPropertyValue("--" + name).trim();
        return context;
    }

    x(event) {
        return this.margin.left + (event - view.from) / (view.until - view.from) * this.width;
    }

    y(bytes) {
        return this.margin.top + (this.high - bytes) / (this.high - this.low) * this.height;
    }

    /// Event and bytes under the pointer.
    at(pointer) {
        const box = this.canvas.getBoundingClientRect();
        const x = pointer.clientX - box.left - this.margin.left, y = pointer.clientY - box.top - this.margin.top;
        return {
            isInside: x >= 0 && x <= this.width && y >= 0 && y <= this.height,
            event: view.from + x / this.width * (view.until - view.from),
            bytes: this.high - y / this.height * (this.high - this.low),
        };
    }

    /// Iterations as lines, with their numbers where there is room.
    drawIterations(context) {
        const { left, top } = this.margin;
        context.fillStyle = this.ink("quiet");
        context.textBaseline = "bottom";
        context.textAlign = "right";
        if (iterationStarts.length > 0) context.fillText("iteration", left - 7, top - 3);
        context.textAlign = "left";
        let lineEnd = -Infinity, textEnd = -Infinity;
        const first = Math.max(placeOf(iterationStarts, view.from), 0);
        for (let at = first; at < iterationStarts.length && iterationStarts[at] <= view.until; at++) {
            const x = Math.max(Math.round(this.x(iterationStarts[at])), left), number = String(report.iterations[at][1]);
            if (x < lineEnd + 3) continue;
            lineEnd = x;
            context.globalAlpha = 0.45;
            context.fillRect(x, top - 4, 1, this.height + 4);
            context.globalAlpha = 1;
            if (x < textEnd + 6) continue;
            context.fillText(number, x + 3, top - 3);
            textEnd = x + 3 + context.measureText(number).width;
        }
    }

    drawAxes(context) {
        const { left, top } = this.margin, bottom = top + this.height;
        context.strokeStyle = this.ink("line");
        context.lineWidth = 1;
        context.strokeRect(left - 0.5, top - 0.5, this.width + 1, this.height + 1);
        context.fillStyle = this.ink("quiet");
        context.textAlign = "right";
        context.textBaseline = "middle";
        // A unit in which neighbouring labels differ within two digits after the point.
        const unit = Math.min(unitOf(this.high), unitOf((this.high - this.low) * 8)), unitBytes = 1024 ** unit;
        const step = Math.max(roundStep((this.high - this.low) / unitBytes, this.height / 45), unit === 0 ? 1 : 0);
        const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
        for (let tick = Math.ceil(this.low / unitBytes / step); tick * step * unitBytes <= this.high; tick++) {
            const y = this.y(tick * step * unitBytes);
            if (y < top + 7 && iterationStarts.length > 0) continue;
            context.fillRect(left - 4, Math.round(y), 4, 1);
            const number = (tick * step).toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
            context.fillText(number + " " + UNITS[unit], left - 7, y);
        }
        context.textBaseline = "top";
        context.textAlign = "center";
        const events = Math.max(roundStep(view.until - view.from, this.width / 110), 1);
        for (let event = Math.ceil(view.from / events) * events; event <= view.until; event += events) {
            context.fillRect(Math.round(this.x(event)), bottom, 1, 4);
            context.fillText(count(event), this.x(event), bottom + 6);
        }
        context.fillText("events: requests and frees, in the order in which they came", left + this.width / 2, bottom + 21);
    }
}

/// 1, 2 or 5 times a power of ten, so that about `wanted` steps make `length`.
function roundStep(length, wanted) {
    const rough = length / Math.max(wanted, 1);
    const power = 10 ** Math.floor(Math.log10(rough));
    return power * ([1, 2, 5].find((factor) => factor * power >= rough) || 10);
}
