// Modules. The machine code of this device is PTX: the assembler that it brings (see stand_in.py) hands PTX on as it is.
#include <ctype.h>

#include "ptx.h"

static int module_count;

// ---- a little reading of PTX: where an entry and its parameters, or a global, are declared
static const char* skip_spaces(const char* t) {
  while (isspace((unsigned char)*t)) t++;
  return t;
}
static size_t word_length(const char* t) { return strspn(t, "_$%.abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"); }

int ptx_type_bytes(const char* t) {  // of a word such as .u32
  if (!strncmp(t, ".pred", 5)) return 1;
  return atoi(t + 2 + (t[1] == 'b' && t[2] == 'f')) / 8;
}

// One declaration, up to `end`: `.param .align 8 .b8 name[48]`. The first word of the form .TYPE gives the size of an element.
static void read_declaration(const char* t, const char* end, char** name, int* bytes, int* alignment) {
  int element = 0, count = 1;
  *alignment = 0;
  *name = NULL;
  while ((t = skip_spaces(t)) < end) {
    size_t n = word_length(t);
    if (!strncmp(t, ".align", 6)) *alignment = (int)strtol(t + 6, NULL, 10);
    else if (*t == '.' && strchr("busf", t[1]) && isdigit((unsigned char)t[2])) element = ptx_type_bytes(t);
    else if (*t == '[') count = (int)strtol(t + 1, NULL, 10);
    else if (n && *t != '.' && !isdigit((unsigned char)*t)) *name = strndup(t, n);
    t += n ? n : 1;
  }
  *bytes = element * count;
  if (!*alignment) *alignment = element ? element : 1;
}

static void add_parameters(Function* f, const char* t, const char* end) {
  int offset = 0;
  while (t < end) {
    const char* stop = memchr(t, ',', (size_t)(end - t));
    if (!stop) stop = end;
    char* name;
    int bytes, alignment;
    read_declaration(t, stop, &name, &bytes, &alignment);
    t = stop + 1;
    if (!name) continue;
    offset = (offset + alignment - 1) / alignment * alignment;
    f->parameters = realloc(f->parameters, sizeof *f->parameters * (size_t)(f->parameter_count + 1));
    f->parameters[f->parameter_count++] = (Parameter){name, offset, bytes};
    offset += bytes;
  }
}

static void add_functions(Module* m) {
  for (const char* t = m->ptx; (t = strstr(t, ".entry"));) {
    t = skip_spaces(t + 6);
    size_t n = word_length(t);
    m->functions = realloc(m->functions, sizeof(Function) * (size_t)(m->function_count + 1));
    Function* f = &m->functions[m->function_count++];
    *f = (Function){.name = strndup(t, n), .module = m};
    t = skip_spaces(t + n);
    const char* end = *t == '(' ? strchr(t, ')') : NULL;
    if (end) add_parameters(f, t + 1, end);
  }
}

// `.global .align 128 .b8 name[16] = {0, 0, 128, 63};`, and constants likewise, outside functions
static void fill_global(const Global* g, const char* t, const char* end) {
  const char* list = memchr(t, '=', (size_t)(end - t));
  memset((void*)g->address, 0, g->bytes);
  if (!list) return;
  const char* declared = strstr(t, ".b8");
  int element = declared && declared < end ? 1 : 0;
  for (const char* type = t; !element && (type = strchr(type, '.')) && type < end; type++)
    if (strchr("busf", type[1]) && isdigit((unsigned char)type[2])) element = ptx_type_bytes(type);
  uint8_t* to = (uint8_t*)g->address;
  for (list++; list < end && to < (uint8_t*)g->address + g->bytes; list++) {
    if (!isdigit((unsigned char)*list) && *list != '-') continue;
    char* after;
    uint64_t value = *list == '-' ? (uint64_t)strtoll(list, &after, 0) : strtoull(list, &after, 0);
    if (*list == '0' && (list[1] == 'f' || list[1] == 'd' || list[1] == 'F' || list[1] == 'D')) value = strtoull(list + 2, &after, 16);
    memcpy(to, &value, (size_t)element);
    to += element;
    list = after - 1;
  }
}

static CUresult add_globals(Module* m) {
  static const char* const words[] = {".global", ".const"};
  for (int w = 0; w < 2; w++)
    for (const char* t = m->ptx; (t = strstr(t, words[w])); t++) {
      bool outside = t == m->ptx || t[-1] == '\n' || !strncmp(t - 9, ".visible ", 9);  // else it is a word of an instruction
      const char* end = strchr(t, ';');
      if (!outside || !end || !isspace((unsigned char)t[strlen(words[w])])) continue;
      const char* equals = memchr(t, '=', (size_t)(end - t));
      char* name;
      int bytes, alignment;
      read_declaration(t + strlen(words[w]), equals ? equals : end, &name, &bytes, &alignment);
      if (!name) continue;
      m->globals = realloc(m->globals, sizeof(Global) * (size_t)(m->global_count + 1));
      Global* g = &m->globals[m->global_count++];
      *g = (Global){.name = name, .bytes = (size_t)bytes};
      CUresult status = device_allocate(&g->address, g->bytes);
      if (status) return status;
      fill_global(g, t, end);
    }
  return CUDA_SUCCESS;
}

// ---- the driver's calls
static CUresult load(CUmodule* out, const char* image) {
  Module* m = calloc(1, sizeof *m);
  m->id = __atomic_add_fetch(&module_count, 1, __ATOMIC_RELAXED);
  *out = (CUmodule)m;
  if (!strstr(image, ".version")) {  // real machine code: a module without functions
    log_line("MODULE M%d functions=0 globals=0", m->id);
    return CUDA_SUCCESS;
  }
  m->ptx = strdup(image);
  add_functions(m);
  CUresult status = add_globals(m);
  log_line("MODULE M%d functions=%d globals=%d", m->id, m->function_count, m->global_count);
  return status;
}
EXPORT CUresult cuModuleLoadData(CUmodule* out, const void* image) {
  CALLED;
  return load(out, image);
}
EXPORT CUresult cuModuleLoadDataEx(CUmodule* out, const void* image, unsigned count, const int* options, void** values) {
  CALLED;
  enum { INFO_LOG_BYTES = 4, ERROR_LOG_BYTES = 6 };
  for (unsigned i = 0; i < count; i++)
    if (options[i] == INFO_LOG_BYTES || options[i] == ERROR_LOG_BYTES) values[i] = NULL;
  return load(out, image);
}
EXPORT CUresult cuModuleLoadFatBinary(CUmodule* out, UNUSED const void* image) {
  CALLED;
  return load(out, "");
}
CUresult cuMemFree_v2(CUdeviceptr start);
EXPORT CUresult cuModuleUnload(CUmodule module) {
  CALLED;
  Module* m = (Module*)module;
  log_line("UNLOAD M%d", m->id);
  for (int i = 0; i < m->global_count; i++) cuMemFree_v2(m->globals[i].address);
  m->global_count = 0;  // the rest stays: operations may still name its functions
  return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleGetFunction(CUfunction* out, CUmodule module, const char* name) {
  CALLED;
  Module* m = (Module*)module;
  for (int i = 0; i < m->function_count; i++)
    if (!strcmp(m->functions[i].name, name)) {
      *out = (CUfunction)&m->functions[i];
      return CUDA_SUCCESS;
    }
  log_line("NOFUNCTION M%d %s", m->id, name);
  return CUDA_ERROR_NOT_FOUND;
}
EXPORT CUresult cuModuleGetGlobal_v2(CUdeviceptr* address, size_t* bytes, CUmodule module, const char* name) {
  CALLED;
  Module* m = (Module*)module;
  for (int i = 0; i < m->global_count; i++) {
    if (strcmp(m->globals[i].name, name)) continue;
    if (address) *address = m->globals[i].address;
    if (bytes) *bytes = m->globals[i].bytes;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_NOT_FOUND;
}
EXPORT CUresult cuFuncGetAttribute(int* out, int which, UNUSED CUfunction function) {
  CALLED;
  *out = which == FUNCTION_NUM_REGS ? 32 : which == FUNCTION_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetAttribute(UNUSED CUfunction function, UNUSED int which, UNUSED int value) {
  CALLED;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetCacheConfig(UNUSED CUfunction function, UNUSED int configuration) {
  CALLED;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* out, UNUSED CUfunction function, UNUSED int threads,
                                                            UNUSED size_t shared_bytes) {
  CALLED;
  *out = 2;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, UNUSED CUfunction function, UNUSED int threads,
                                                                     UNUSED size_t shared_bytes, UNUSED unsigned flags) {
  CALLED;
  *out = 2;
  return CUDA_SUCCESS;
}
