// What the page uses of d3.
export { max, min, quantile, sum } from "d3-array";
export { axisBottom, axisLeft } from "d3-axis";
export { scaleBand, scaleLinear } from "d3-scale";
export { pointer, select } from "d3-selection";
export { area, curveStepAfter, line, stack } from "d3-shape";
export { zoom, zoomIdentity, zoomTransform } from "d3-zoom";
