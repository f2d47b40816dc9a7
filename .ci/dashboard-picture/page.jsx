// The page: the dashboard's panels at their places, with the answers that tests/browser/dashboard.py has put beside it.
// It sets window.drawn when everything stands, and throws at whatever it does not know.

import { applyFieldOverrides, createTheme, dateTime, EventBusSrv, FieldType, ThemeContext, toDataFrame } from "@grafana/data";
import { initPluginTranslations } from "@grafana/i18n";
import { GlobalStyles, Icon, PanelChrome, PanelContextProvider, useTheme2 } from "@grafana/ui";
import { createRoot } from "react-dom/client";

import { checked } from "./plugins.jsx";

const COLUMNS = 24, CELL = 30, MARGIN = 8; // Grafana's grid

const { dashboard, answers, from, to, step, width, scheme } = window.given;
const timeZone = "utc";
const timeRange = { from: dateTime(from * 1000), to: dateTime(to * 1000), raw: { from: "now", to: "now" } };

/** A legend as the data source for Prometheus writes it. */
const legend = (format, labels) => format.replace(/{{\s*(\w+)\s*}}/g, (_, label) => labels[label] ?? label);

/** The answers to a panel's questions: a frame for each series. */
const framesOf = (panel) =>
  panel.targets.flatMap((target) =>
    answers[panel.id][target.refId].map(({ metric, values }) =>
      toDataFrame({
        refId: target.refId,
        fields: [
          { name: "Time", type: FieldType.time, values: values.map(([s]) => s * 1000), config: { interval: step * 1000 } },
          {
            name: "Value", type: FieldType.number, values: values.map(([, value]) => Number(value)), labels: metric,
            config: { displayNameFromDS: legend(target.legendFormat, metric) },
          },
        ],
      }),
    ),
  );

function Panel({ panel, width, height }) {
  const theme = useTheme2();
  const { plugin, options, fieldConfig } = checked(panel);
  const frames = framesOf(panel);
  const data = applyFieldOverrides({
    data: frames, fieldConfig, fieldConfigRegistry: plugin.fieldConfigRegistry, theme, timeZone,
    replaceVariables: (text) => text,
  });
  const Drawing = plugin.panel;
  return (
    <PanelChrome title={panel.title} description={panel.description} width={width} height={height}>
      {(innerWidth, innerHeight) =>
        data.length ? (
          <Drawing {...{ options, fieldConfig, timeRange, timeZone }} frames={data} width={innerWidth} height={innerHeight} />
        ) : (
          <div className="no-data" style={{ color: theme.colors.text.secondary, width: innerWidth, height: innerHeight }}>
            No data
          </div>
        )
      }
    </PanelChrome>
  );
}

function Row({ panel }) {
  const theme = useTheme2();
  if (panel.collapsed || panel.panels.length) throw new Error(`row ${panel.title}: is collapsed, which cannot be drawn`);
  return (
    <div className="row-title" style={{ ...theme.typography.h6, color: theme.colors.text.primary }}>
      <Icon name="angle-down" /> {panel.title}
    </div>
  );
}

function Dashboard() {
  const theme = useTheme2();
  const column = (width - MARGIN) / COLUMNS; // with the margin at its right
  const bottom = Math.max(...dashboard.panels.map(({ gridPos: g }) => g.y + g.h));
  const size = { width, height: bottom * (CELL + MARGIN) + MARGIN };
  return (
    <div id="dashboard" style={{ ...size, background: theme.colors.background.canvas }}>
      {dashboard.panels.map((panel) => {
        const { x, y, w, h } = panel.gridPos;
        const box = {
          left: MARGIN + x * column, top: MARGIN + y * (CELL + MARGIN),
          width: w * column - MARGIN, height: h * (CELL + MARGIN) - MARGIN,
        };
        return (
          <div key={panel.id} className="place" data-type={panel.type} data-title={panel.title} style={box}>
            {panel.type === "row" ? <Row panel={panel} /> : <Panel panel={panel} width={box.width} height={box.height} />}
          </div>
        );
      })}
    </div>
  );
}

/** Panels that do not stand yet: an icon that is not there, a graph that is blank, a value without a text. */
function missing() {
  const has = {
    stat: (place) => place.innerText.trim() !== place.dataset.title,
    timeseries: (place) => [...place.querySelectorAll(".uplot canvas")].some(inked),
  };
  return [...document.querySelectorAll(".place")].filter(
    (place) =>
      [...place.querySelectorAll("svg")].some((svg) => !svg.childElementCount) ||
      !(place.querySelector(".no-data, .row-title") || has[place.dataset.type](place)),
  );
}

function inked(canvas) {
  if (!canvas.width || !canvas.height) return false;
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  return copy.getImageData(0, 0, canvas.width, canvas.height).data.some((byte) => byte);
}

function whenDrawn(quiet) {
  const left = document.getElementById("dashboard") ? missing() : ["the dashboard"];
  window.missing = left.map((place) => place.dataset?.title ?? place);
  // Two frames in a row without anything missing: what a first frame has measured, a second one draws.
  if (!left.length && quiet && document.fonts.status === "loaded") window.drawn = true;
  else requestAnimationFrame(() => whenDrawn(!left.length));
}

const theme = createTheme({ colors: { mode: scheme } });
await initPluginTranslations("kvactors", []);
const root = createRoot(document.getElementById("root"));
const draw = (children) =>
  root.render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <PanelContextProvider value={{ eventsScope: "global", eventBus: new EventBusSrv() }}>{children}</PanelContextProvider>
    </ThemeContext.Provider>,
  );

// Canvases do not wait for fonts: the styles that name them come first, then the fonts, then the dashboard.
draw(<div ref={(styled) => styled && fonts().then(() => draw(<Dashboard />))} />);
async function fonts() {
  await Promise.all([400, 500].map((weight) => document.fonts.load(`${weight} 12px Inter`)));
}
requestAnimationFrame(() => whenDrawn(false));
