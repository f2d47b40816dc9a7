// Panel types that can be drawn: what Grafana's libraries have to draw them with, and which options are known.
// What is not registered here is an error, see checked(); nothing is left out silently.

import {
  displayNameOverrideProcessor,
  FieldConfigProperty as Property,
  FieldType,
  getFieldDisplayValues,
  getPanelOptionsWithDefaults,
  getValueFormats,
  identityOverrideProcessor,
  numberOverrideProcessor,
  PanelOptionsEditorBuilder,
  PanelPlugin,
  standardEditorsRegistry,
  standardFieldConfigEditorRegistry,
  stringOverrideProcessor,
  thresholdsOverrideProcessor,
  unitOverrideProcessor,
  valueMappingsOverrideProcessor,
  VizOrientation,
} from "@grafana/data";
import { FieldColorModeId, GraphDrawStyle, LineInterpolation, VisibilityMode } from "@grafana/schema";
import { BigValue, commonOptionsBuilder, TimeSeries, useTheme2, VizRepeater } from "@grafana/ui";

const nothing = () => null;
const numbersOnly = (field) => field.type === FieldType.number;

// Editors are for Grafana's forms; a picture has none. The registries ask for them all the same.
const EDITORS = ["boolean", "color", "multi-select", "number", "radio", "select", "slider", "stats-picker", "text", "unit"];
standardEditorsRegistry.setInit(() => EDITORS.map((id) => ({ id, name: id, editor: nothing })));

const standard = (id, process, more = {}) => ({
  id, path: id, name: id, editor: nothing, override: nothing, process, shouldApply: numbersOnly, category: [], settings: {},
  ...more,
});

// The standard options of every field. A dashboard without thresholds of its own gets these: Grafana's documentation has them.
standardFieldConfigEditorRegistry.setInit(() => [
  standard(Property.Unit, unitOverrideProcessor),
  standard(Property.Min, numberOverrideProcessor),
  standard(Property.Max, numberOverrideProcessor),
  standard(Property.Decimals, numberOverrideProcessor),
  standard(Property.DisplayName, displayNameOverrideProcessor, { shouldApply: () => true }),
  standard(Property.NoValue, stringOverrideProcessor, { shouldApply: () => true }),
  standard(Property.Mappings, valueMappingsOverrideProcessor, { defaultValue: [] }),
  standard(Property.Color, identityOverrideProcessor),
  standard(Property.Thresholds, thresholdsOverrideProcessor, {
    defaultValue: { mode: "absolute", steps: [{ value: -Infinity, color: "green" }, { value: 80, color: "red" }] },
  }),
]);

/** Options by path, each with what it is where a dashboard does not say. */
const register = (builder, options, more = {}) =>
  Object.entries(options).forEach(([path, defaultValue]) =>
    builder.addCustomEditor({ id: path, path, name: path, editor: nothing, override: nothing, defaultValue, ...more }),
  );

function Stat({ options, fieldConfig, frames, width, height, timeZone }) {
  const theme = useTheme2();
  const getValues = () =>
    getFieldDisplayValues({
      data: frames, fieldConfig, theme, timeZone, reduceOptions: options.reduceOptions, sparkline: options.graphMode !== "none",
      replaceVariables: (text) => text,
    });
  return (
    <VizRepeater
      getValues={getValues} source={frames} width={width} height={height} orientation={VizOrientation.Auto} itemSpacing={3}
      renderValue={({ value, width, height, count, alignmentFactors }) => (
        <BigValue
          value={value.display} sparkline={value.sparkline} theme={theme} width={width} height={height} count={count}
          alignmentFactors={alignmentFactors} colorMode={options.colorMode} graphMode={options.graphMode}
          justifyMode={options.justifyMode} textMode={options.textMode} disableWideLayout={!options.wideLayout}
        />
      )}
    />
  );
}

function Graph({ options, frames, width, height, timeRange, timeZone }) {
  return <TimeSeries {...{ frames, width, height, timeRange, timeZone, structureRev: 1 }} legend={options.legend} />;
}

const stat = new PanelPlugin(Stat)
  .setPanelOptions((builder) =>
    register(builder, {
      "reduceOptions.values": false,
      "reduceOptions.calcs": ["lastNotNull"],
      "reduceOptions.fields": "",
      colorMode: "value",
      graphMode: "area",
      justifyMode: "auto",
      textMode: "auto",
      wideLayout: true,
    }),
  )
  .useFieldConfig({ standardOptions: { [Property.Color]: { defaultValue: { mode: FieldColorModeId.Thresholds } } } });

const timeseries = new PanelPlugin(Graph)
  .setPanelOptions((builder) => {
    commonOptionsBuilder.addLegendOptions(builder);
    commonOptionsBuilder.addTooltipOptions(builder); // seen under a pointer only
  })
  .useFieldConfig({
    standardOptions: { [Property.Color]: { defaultValue: { mode: FieldColorModeId.PaletteClassic } } },
    useCustomConfig: (builder) => {
      const lines = {
        drawStyle: GraphDrawStyle.Line, lineInterpolation: LineInterpolation.Linear, lineWidth: 1, fillOpacity: 0,
        gradientMode: "none", showPoints: VisibilityMode.Auto, pointSize: 5, spanNulls: false, "thresholdsStyle.mode": "off",
      };
      register(builder, lines, { process: identityOverrideProcessor, shouldApply: numbersOnly });
      commonOptionsBuilder.addStackingConfig(builder);
      commonOptionsBuilder.addAxisConfig(builder, {});
    },
  });

const PLUGINS = { stat, timeseries };

/** Paths of all values of an object that are not objects themselves, beside those that a registry knows as a whole. */
function* leaves(value, known, path = "") {
  for (const [key, inner] of Object.entries(value)) {
    const here = path + key;
    const nested = inner !== null && typeof inner === "object" && !Array.isArray(inner);
    if (nested && !known(here)) yield* leaves(inner, known, `${here}.`);
    else yield here;
  }
}

function refuse(what, paths, known) {
  const unknown = [...paths].filter((path) => !known(path));
  if (!unknown.length) return;
  throw new Error(`${what}: ${unknown.join(", ")} cannot be drawn: add it to .ci/dashboard-picture/plugins.jsx`);
}

const PANEL_KEYS = ["id", "type", "title", "description", "datasource", "gridPos", "fieldConfig", "targets", "options"];
const TARGET_KEYS = ["refId", "datasource", "expr", "legendFormat"];
const UNITS = getValueFormats().flatMap((group) => group.submenu.map((unit) => unit.value));
const OWN_UNIT = /^(count|si|prefix|suffix):/;

/** The plugin of a panel, with the panel's options and the defaults of all others; throws at anything that is unknown. */
export function checked(panel) {
  const what = `panel ${panel.id}, ${panel.title}`;
  const plugin = PLUGINS[panel.type];
  if (!plugin) throw new Error(`${what}: of type ${panel.type}, of which nothing is known`);
  refuse(what, Object.keys(panel), (key) => PANEL_KEYS.includes(key));
  for (const target of panel.targets) {
    refuse(`${what}, target ${target.refId}`, Object.keys(target), (key) => TARGET_KEYS.includes(key));
  }
  refuse(`${what}, field config`, Object.keys(panel.fieldConfig), (key) => ["defaults", "overrides"].includes(key));
  // Grafana itself writes a unit that it does not know behind the figure.
  refuse(`${what}, unit`, [panel.fieldConfig.defaults.unit ?? "none"], (unit) => UNITS.includes(unit) || OWN_UNIT.test(unit));
  const fields = plugin.fieldConfigRegistry;
  // A custom field option is registered with its path within `custom`, and an id that has `custom.` before it.
  const knownField = (path) => fields.list().some((item) => path === item.id || path.startsWith(`${item.id}.`));
  refuse(`${what}, field config`, leaves(panel.fieldConfig.defaults, knownField), knownField);
  for (const rule of panel.fieldConfig.overrides) {
    refuse(`${what}, overrides`, rule.properties.map((property) => property.id), knownField);
  }
  const options = new PanelOptionsEditorBuilder();
  plugin.getPanelOptionsSupplier()(options, {});
  const knownOption = (path) => options.getItems().some((item) => item.path === path);
  refuse(`${what}, options`, leaves(panel.options, knownOption), knownOption);
  return {
    plugin,
    ...getPanelOptionsWithDefaults({
      plugin, currentOptions: panel.options, currentFieldConfig: panel.fieldConfig, isAfterPluginChange: false,
    }),
  };
}
