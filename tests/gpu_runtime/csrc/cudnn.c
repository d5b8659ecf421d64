// cuDNN's graph interface: descriptors keep what is set, one engine answers for every graph, and a plan that is executed becomes a
// chain of steps (convolution.c) or is refused by name. Descriptors are never freed: a plan refers to those it was made from.
#include "cudnn_abi.h"

#include "convolution.h"

typedef struct Attribute {
  int name, type;
  int64_t count;
  void* data;
  struct Attribute* next;
} Attribute;
typedef struct Descriptor {
  int type;
  Attribute* attributes;
} Descriptor;
typedef struct {
  CUstream stream;
} Handle;

HANDLE_WITH_STREAM(cudnn, )
EXPORT const char* cudnnGetErrorString(int error) { return status_text(error); }
EXPORT void cudnnGetLastErrorString(char* out, size_t room) {
  const char* refused = last_refusal();
  if (room) snprintf(out, room, "%s", refused ? refused : "");
}
EXPORT int cudnnGraphVersionCheck(void) { return CUDNN_SUCCESS; }
EXPORT int cudnnOpsVersionCheck(void) { return CUDNN_SUCCESS; }
EXPORT int cudnnCnnVersionCheck(void) { return CUDNN_SUCCESS; }
EXPORT int cudnnAdvVersionCheck(void) { return CUDNN_SUCCESS; }

// ---- descriptors
static int64_t attribute_bytes(int type) {
  switch (type) {
    case TYPE_HANDLE:
    case TYPE_INT64:
    case TYPE_DOUBLE:
    case TYPE_VOID_PTR:
    case TYPE_DESCRIPTOR: return 8;
    case TYPE_BOOLEAN: return 1;
    default: return 4;
  }
}
static Attribute* attribute(const Descriptor* d, int name) {
  for (Attribute* a = d ? d->attributes : NULL; a; a = a->next)
    if (a->name == name) return a;
  return NULL;
}
static void put(Descriptor* d, int name, int type, int64_t count, const void* data) {
  Attribute* a = attribute(d, name);
  if (!a) {
    a = calloc(1, sizeof *a);
    a->next = d->attributes;
    d->attributes = a;
  }
  size_t bytes = (size_t)(count * attribute_bytes(type));
  free(a->data);
  *a = (Attribute){name, type, count, malloc(bytes + 8), a->next};
  memcpy(a->data, data, bytes);
}
static Descriptor* child(const Descriptor* d, int name) {
  Attribute* a = attribute(d, name);
  return a ? *(Descriptor**)a->data : NULL;
}
static int64_t integer(const Descriptor* d, int name, int64_t otherwise) {
  Attribute* a = attribute(d, name);
  if (!a) return otherwise;
  return a->type == TYPE_INT64 ? *(int64_t*)a->data : a->type == TYPE_BOOLEAN ? *(char*)a->data : *(int*)a->data;
}
static double real(const Descriptor* d, int name, double otherwise) {
  Attribute* a = attribute(d, name);
  return !a ? otherwise : a->type == TYPE_DOUBLE ? *(double*)a->data : (double)*(float*)a->data;
}

EXPORT int cudnnBackendCreateDescriptor(int type, Descriptor** out) {
  CALLED;
  *out = calloc(1, sizeof **out);
  (*out)->type = type;
  return CUDNN_SUCCESS;
}
EXPORT int cudnnBackendDestroyDescriptor(UNUSED Descriptor* d) {
  CALLED;
  return CUDNN_SUCCESS;
}
EXPORT int cudnnBackendInitialize(UNUSED Descriptor* d) {
  CALLED;
  return CUDNN_SUCCESS;
}
EXPORT int cudnnBackendFinalize(UNUSED Descriptor* d) {
  CALLED;
  return CUDNN_SUCCESS;
}
EXPORT int cudnnBackendSetAttribute(Descriptor* d, int name, int type, int64_t count, const void* data) {
  CALLED;
  put(d, name, type, count, data);
  return CUDNN_SUCCESS;
}

// What a heuristic finds: engine 0, and one with the workspace that STAND_IN_WORKSPACE says, if it does. XLA's autotuner takes the
// second, as engine 0 then takes 20 ms more.
static int64_t workspace_bytes(void) {
  const char* bytes = getenv("STAND_IN_WORKSPACE");
  return bytes ? atoll(bytes) : 0;
}
static int64_t engines(void) { return workspace_bytes() ? 2 : 1; }
static int64_t engine_of(const Descriptor* d) {
  const Descriptor* config = d->type == EXECUTION_PLAN ? child(d, PLAN_ENGINECFG) : d;
  return integer(child(config, ENGINECFG_ENGINE), ENGINE_INDEX, 0);
}
static void answer_heuristic(const Descriptor* heuristic, Descriptor* config, int64_t index) {
  Descriptor* engine = calloc(1, sizeof *engine);
  Attribute* graph = attribute(heuristic, HEURISTIC_GRAPH);
  engine->type = ENGINE;
  put(engine, ENGINE_GRAPH, graph->type, 1, graph->data);
  put(engine, ENGINE_INDEX, TYPE_INT64, 1, &index);
  put(config, ENGINECFG_ENGINE, TYPE_DESCRIPTOR, 1, &engine);
}

EXPORT int cudnnBackendGetAttribute(const Descriptor* d, int name, UNUSED int type, int64_t room, int64_t* count, void* out) {
  CALLED;
  int64_t nowhere, *n = count ? count : &nowhere;
  if (d->type == ENGINE_HEURISTIC && name == HEURISTIC_RESULTS) {
    *n = engines();
    for (int64_t i = 0; out && i < room && i < *n; i++) answer_heuristic(d, ((Descriptor**)out)[i], i);
    return CUDNN_SUCCESS;
  }
  Attribute* a = attribute(d, name);
  if (!a) {
    bool workspace = name == ENGINECFG_WORKSPACE || name == PLAN_WORKSPACE, count = name == GRAPH_ENGINE_COUNT;
    *n = workspace || count;
    if (*n && out) *(int64_t*)out = count ? engines() : engine_of(d) ? workspace_bytes() : 0;
    return CUDNN_SUCCESS;
  }
  *n = a->count;
  int64_t copied = a->count < room ? a->count : room;
  if (!out) return CUDNN_SUCCESS;
  if (a->type != TYPE_DESCRIPTOR) memcpy(out, a->data, (size_t)(copied * attribute_bytes(a->type)));
  else
    for (int64_t i = 0; i < copied; i++) *((Descriptor**)out)[i] = *((Descriptor**)a->data)[i];
  return CUDNN_SUCCESS;
}

// ---- from descriptors to steps
static __thread const char* reason;  // why the last graph was refused
static bool cannot(const char* why) {
  reason = why;
  return false;
}

static bool read_tensor(const Descriptor* d, const Descriptor* pack, Tensor* t) {
  Attribute *size = attribute(d, TENSOR_DIMENSIONS), *stride = attribute(d, TENSOR_STRIDES);
  Attribute *ids = attribute(pack, PACK_IDS), *pointers = attribute(pack, PACK_POINTERS);
  if (!size || !stride || size->count > MAX_RANK || size->count < 3) return cannot("a tensor of this rank");
  *t = (Tensor){.id = integer(d, TENSOR_ID, 0), .is_virtual = integer(d, TENSOR_VIRTUAL, 0), .type = (int)integer(d, TENSOR_TYPE, 0)};
  t->rank = (int)size->count;
  memcpy(t->size, size->data, sizeof(int64_t) * (size_t)size->count);
  memcpy(t->stride, stride->data, sizeof(int64_t) * (size_t)size->count);
  if (t->type != DNN_FLOAT && t->type != DNN_HALF && t->type != DNN_BFLOAT16 && t->type != DNN_DOUBLE) return cannot("a tensor of this type");
  for (int64_t i = 0; ids && pointers && i < ids->count && i < pointers->count; i++)
    if (((int64_t*)ids->data)[i] == t->id) t->at = ((char**)pointers->data)[i];
  return t->at || t->is_virtual ? true : cannot("a tensor without memory");
}

static bool read_convolution(const Descriptor* o, const Descriptor* pack, Step* s) {
  static const int names[][6] = {{FORWARD_X, FORWARD_W, FORWARD_Y, FORWARD_CONVOLUTION, FORWARD_ALPHA, FORWARD_BETA},
                                 {DATA_DX, DATA_W, DATA_DY, DATA_CONVOLUTION, DATA_ALPHA, DATA_BETA},
                                 {FILTER_X, FILTER_DW, FILTER_DY, FILTER_CONVOLUTION, FILTER_ALPHA, FILTER_BETA}};
  s->direction = o->type == CONVOLUTION_FORWARD ? FORWARD : o->type == CONVOLUTION_BACKWARD_DATA ? BACKWARD_DATA : BACKWARD_FILTER;
  const int* name = names[s->direction];
  bool read = read_tensor(child(o, name[0]), pack, &s->x) && read_tensor(child(o, name[1]), pack, &s->w) &&
              read_tensor(child(o, name[2]), pack, &s->y);
  if (!read) return false;
  if (s->w.is_virtual) return cannot("a filter that is virtual");
  const Descriptor* c = child(o, name[3]);
  s->reversed = integer(c, CONVOLUTION_MODE, CROSS_CORRELATION) != CROSS_CORRELATION;
  size_t bytes = sizeof(int64_t) * (size_t)(s->x.rank - 2);
  memcpy(s->padding, attribute(c, CONVOLUTION_PRE_PADDINGS)->data, bytes);
  memcpy(s->step, attribute(c, CONVOLUTION_STRIDES)->data, bytes);
  memcpy(s->dilation, attribute(c, CONVOLUTION_DILATIONS)->data, bytes);
  s->alpha = real(o, name[4], 1);
  s->beta = real(o, name[5], 0);
  return true;
}

static bool read_pointwise(const Descriptor* o, const Descriptor* pack, Step* s) {
  const Descriptor* p = child(o, POINTWISE_OPERATION);
  s->is_pointwise = true;
  s->mode = (int)integer(p, POINTWISE_MODE, MODE_IDENTITY);
  switch (s->mode) {
    case MODE_ADD: case MODE_SUB: case MODE_MUL: case MODE_DIV: case MODE_MIN: case MODE_MAX: case MODE_RELU: case MODE_IDENTITY: break;
    default: return cannot("a pointwise operation of this mode");
  }
  s->lower = real(p, POINTWISE_LOWER_CLIP, 0);
  s->upper = real(p, POINTWISE_UPPER_CLIP, 3.4028234663852886e38);
  if (real(p, POINTWISE_LOWER_SLOPE, 0) != 0) return cannot("a leaky relu");
  s->alpha = real(o, POINTWISE_ALPHA1, 1);
  s->beta = real(o, POINTWISE_ALPHA2, 1);
  // What is scaled by 0 is not read: without a side input XLA names the result's own memory, which nobody wrote yet.
  s->has_second = child(o, POINTWISE_B) && s->beta != 0;
  return read_tensor(child(o, POINTWISE_X), pack, &s->x) && read_tensor(child(o, POINTWISE_Y), pack, &s->y) &&
         (!s->has_second || read_tensor(child(o, POINTWISE_B), pack, &s->w));
}

static bool read_step(const Descriptor* o, const Descriptor* pack, Step* s) {
  switch (o->type) {
    case CONVOLUTION_FORWARD:
    case CONVOLUTION_BACKWARD_DATA:
    case CONVOLUTION_BACKWARD_FILTER: return read_convolution(o, pack, s);
    case POINTWISE: return read_pointwise(o, pack, s);
    default: return cannot("an operation of this kind");
  }
}

static const char* name_of(const Descriptor* o) {
  switch (o->type) {
    case CONVOLUTION_FORWARD: return "cudnnConvolutionForward";
    case CONVOLUTION_BACKWARD_DATA: return "cudnnConvolutionBackwardData";
    case CONVOLUTION_BACKWARD_FILTER: return "cudnnConvolutionBackwardFilter";
    default: return "cudnnGraph";
  }
}

// ---- execution
typedef struct {
  const void* pointers[3 * MAX_STEPS + 2];
  int64_t bytes[3 * MAX_STEPS + 2];
  char access[3 * MAX_STEPS + 3];
  int count;
} Ranges;
static void add_range(Ranges* r, const Tensor* t, bool written) {
  if (t->is_virtual || !t->at) return;
  r->pointers[r->count] = t->at;
  r->bytes[r->count] = tensor_bytes(t);
  r->access[r->count++] = written ? 'w' : 'r';
}
static void add_ranges(Ranges* r, const Step* s) {
  bool to_x = !s->is_pointwise && s->direction == BACKWARD_DATA, to_w = !s->is_pointwise && s->direction == BACKWARD_FILTER;
  add_range(r, &s->x, to_x);
  if (!s->is_pointwise || s->has_second) add_range(r, &s->w, to_w);
  add_range(r, &s->y, !to_x && !to_w);
}

EXPORT int cudnnBackendExecute(const Handle* h, const Descriptor* plan, const Descriptor* pack) {
  CALLED;
  const Descriptor* graph = child(child(child(plan, PLAN_ENGINECFG), ENGINECFG_ENGINE), ENGINE_GRAPH);
  Attribute* operations = attribute(graph, GRAPH_OPERATIONS);
  if (!operations || operations->count > MAX_STEPS) return refuse(CUDNN_NOT_SUPPORTED, "a cuDNN graph of this size");
  const Descriptor* const* o = operations->data;
  Chain* chain = new_work(sizeof *chain, "LIBCALL", run_chain, NULL);
  Ranges ranges = {0};
  for (; chain->count < operations->count; chain->count++) {
    Step* s = &chain->steps[chain->count];
    if (!read_step(o[chain->count], pack, s)) break;
    add_ranges(&ranges, s);
  }
  if (chain->count < operations->count) {
    int step = chain->count;
    drop_work(&chain->work);
    return refuse(CUDNN_NOT_SUPPORTED, "%s: %s (step %d, descriptor %d)", name_of(o[0]), reason, step, o[step]->type);
  }
  if (engine_of(plan)) {
    ranges.pointers[ranges.count] = *(void**)attribute(pack, PACK_WORKSPACE)->data;
    ranges.bytes[ranges.count] = workspace_bytes();
    ranges.access[ranges.count++] = 'w';
  }
  chain->is_slow = engines() > 1 && !engine_of(plan);
  return library_call(h->stream, &chain->work, name_of(o[0]), ranges.count, ranges.pointers, ranges.bytes, ranges.access);
}
