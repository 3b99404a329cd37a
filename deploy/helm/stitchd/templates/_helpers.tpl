{{- define "stitchd.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "stitchd.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 56 | trimSuffix "-" -}}
{{- else if contains (include "stitchd.name" .) .Release.Name -}}
{{- .Release.Name | trunc 56 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "stitchd.name" .) | trunc 56 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "stitchd.selector" -}}
app.kubernetes.io/name: {{ include "stitchd.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "stitchd.labels" -}}
{{ include "stitchd.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "stitchd.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "stitchd.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "stitchd.fullname" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end -}}

{{/* Probes of a daemon that serves HTTP. */}}
{{- define "stitchd.probes" -}}
startupProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 1
  failureThreshold: {{ .Values.startupSeconds }}
livenessProbe:
  httpGet: {path: /livez, port: metrics}
  periodSeconds: 10
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 5
{{- end -}}

{{/* What every pod of the chart that needs root has, beside its own. */}}
{{- define "stitchd.node" -}}
automountServiceAccountToken: false
enableServiceLinks: false
serviceAccountName: {{ include "stitchd.serviceAccountName" . }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The configuration as it is given, but for what is the chart's. */}}
{{- define "stitchd.toml" -}}
{{- if hasPrefix (printf "%s/" (clean .Values.runtimeDir)) (printf "%s/" (clean .Values.stateDir)) -}}
{{- fail "stateDir: not in runtimeDir, which clients mount: what is to be taken over is nobody else's" -}}
{{- end -}}
{{- range list "runtime_dir" "state_dir" "http" "driver" -}}
{{- if regexMatch (printf "(?m)^\\s*%s\\s*=" .) $.Values.config -}}
{{- fail (printf "config: %s is the chart's: use runtimeDir, stateDir, metrics.port or gpu.driver" .) -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.mode "sidecar") (not (regexMatch "(?m)^\\s*socket_group\\s*=" .Values.config)) }}
# Containers of the pod have its group, whatever user they are.
socket_group = "65532"
{{ end -}}
{{- if not (regexMatch "(?m)^\\s*[\"']?plans_max[\"']?\\s*=" .Values.config) }}
# They lie in memory, which is the container's.
plans_max = {{ ternary "8MiB" "128MiB" (eq .Values.mode "sidecar") | quote }}
{{ end -}}
{{ .Values.config | trim }}
{{- end -}}
